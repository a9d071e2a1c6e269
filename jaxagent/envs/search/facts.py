"""A small table of countries and cities: as documents, and as questions of one and of two hops about them."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxagent.envs.search.corpus import Document, Question


@dataclasses.dataclass(frozen=True)
class Country:
  """`names`, `currency`: every accepted name, the usual one first. "" or an empty tuple: not known."""

  names: tuple[str, ...]
  capital: str = ""
  currency: tuple[str, ...] = ()
  demonym: str = ""
  region: str = ""
  neighbours: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    return self.names[0]


@dataclasses.dataclass(frozen=True)
class City:
  name: str
  country: str
  population: int


def documents(countries: Sequence[Country], cities: Sequence[City]) -> list[Document]:
  return [*map(_of_country, countries), *map(_of_city, cities)]


def questions(countries: Sequence[Country], cities: Sequence[City]) -> list[Question]:
  return [*_of_countries(countries), *_of_cities(countries, cities)]


def about(country: Country) -> dict[str, tuple[str, ...]]:
  """Answers to "What is the ... of COUNTRY?", where they are known."""
  found = {
    "capital": (country.capital,) if country.capital else (),
    "currency": country.currency,
    "demonym": (country.demonym,) if country.demonym else (),
  }
  return {what: answers for what, answers in found.items() if answers}


def country_page(country: str) -> str:
  return f"{country} (country facts)"


def _of_country(country: Country) -> Document:
  lines = [f"{country.name} is a country" + (f" in {country.region}." if country.region else ".")]
  if country.capital:
    lines.append(f"Its capital is {country.capital}.")
  if country.currency:
    lines.append(f"Its currency is {' or '.join(country.currency)}.")
  if country.demonym:
    lines.append(f"Its people are called {country.demonym}.")
  lines.append(
    f"It borders {', '.join(country.neighbours)}." if country.neighbours else "It borders no other country."
  )
  if len(country.names) > 1:
    lines.append(f"It is also known as {', '.join(country.names[1:])}.")
  return Document(country_page(country.name), " ".join(lines))


def _of_city(city: City) -> Document:
  return Document(
    f"{city.name} (city)", f"{city.name} is a city in {city.country}. Its population is {city.population}."
  )


def _of_countries(countries: Sequence[Country]) -> Iterator[Question]:
  for country in countries:
    page = country_page(country.name)
    for what, answers in about(country).items():
      yield Question(f"What is the {what} of {country.name}?", answers, (page,))
    if country.neighbours:
      yield Question(f"Name a country that borders {country.name}.", country.neighbours, (page,))
    by_capital = f"the country whose capital is {country.capital}"
    if country.capital and sum(other.capital == country.capital for other in countries) == 1:
      find = f"capital is {country.capital}"
      yield Question(f"Which is {by_capital}?", country.names, (find,))
      for what, answers in about(country).items():
        if what != "capital":
          yield Question(f"What is the {what} of {by_capital}?", answers, (find, page))
      if country.neighbours:
        yield Question(f"Name a country that borders {by_capital}.", country.neighbours, (find, page))


def _of_cities(countries: Sequence[Country], cities: Sequence[City]) -> Iterator[Question]:
  known = {country.name: country for country in countries}
  names = [city.name for city in cities]
  for city in cities:
    country = known.get(city.country)
    if country is None or names.count(city.name) > 1 or city.name in (country.capital, country.name):
      continue
    find = f"{city.name} city"
    yield Question(f"In which country is the city of {city.name}?", country.names, (find,))
    yield Question(f"How many people live in {city.name}?", (str(city.population),), (find,))
    for what, answers in about(country).items():
      text = f"What is the {what} of the country in which the city of {city.name} is?"
      yield Question(text, answers, (find, country_page(country.name)))
