"""A world of five invented countries, for tests and first tries."""

from jaxagent.envs.search import facts
from jaxagent.envs.search.corpus import Corpus
from jaxagent.envs.search.facts import City, Country

COUNTRIES = (
  Country(("Orlavia", "Republic of Orlavia"), "Kestrin", ("orl", "Orlavian orl"), "Orlavian", "the north", ("Brenn",)),
  Country(("Brenn",), "Tolva", ("silver mark", "mark"), "Brennish", "the north", ("Orlavia", "Sumara")),
  Country(("Sumara", "Kingdom of Sumara"), "Port Ilan", ("sel",), "Sumaran", "the south", ("Brenn", "Dell")),
  Country(("Dell", "Free State of Dell"), "Dellmouth", ("crown",), "Dellish", "the south", ("Sumara",)),
  Country(("Isle of Quay",), "Quaytown", ("shell", "white shell"), "Quaymen", "the western sea"),
)
CITIES = (
  City("Marnau", "Orlavia", 41000),
  City("Ostrel", "Orlavia", 8300),
  City("Upper Wick", "Brenn", 120500),
  City("Hollin", "Brenn", 9900),
  City("Sand Harbour", "Sumara", 77000),
  City("Ferrow", "Dell", 15200),
  City("Lantern Bay", "Isle of Quay", 640),
)


def corpus() -> Corpus:
  return Corpus(
    tuple(facts.documents(COUNTRIES, CITIES)), tuple(facts.questions(COUNTRIES, CITIES)), {"invented": "Apache-2.0"}
  )
