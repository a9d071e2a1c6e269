"""`python -m jaxagent.envs.search build | vectors | recall`: a corpus from installed packages, and its vectors."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxagent.envs.importing import attribute
from jaxagent.envs.search.corpus import Corpus, read, write
from jaxagent.envs.search.packages import from_packages
from jaxagent.envs.search.retrieval import Dense, as_encode, encoded, load_vectors, recall

PROBES = (1, 2, 4, 8, 16, 32)


def parser() -> argparse.ArgumentParser:
  root = argparse.ArgumentParser(prog="python -m jaxagent.envs.search", description=__doc__)
  commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
  build = commands.add_parser("build", help="write documents and questions to a new folder")
  build.add_argument("folder")
  build.add_argument("--population", type=int, default=300_000, help="of the smallest city that is taken")
  for name, help in (
    ("vectors", "encode the documents, for retriever: dense"),
    ("recall", "share of the flat index's answers that IVF,SQ8 finds"),
  ):
    command = commands.add_parser(name, help=help)
    command.add_argument("folder")
    command.add_argument("--encoder", required=True, metavar="MODULE:NAME", help="texts to vectors")
  command.add_argument("--queries", type=int, default=500, help="questions of the corpus to ask")
  command.add_argument("--top-k", type=int, default=5)
  return root


def main(argv: Sequence[str] | None = None) -> int:
  args = parser().parse_args(argv)
  try:
    {"build": build_command, "vectors": vectors_command, "recall": recall_command}[args.command](args)
  except (ValueError, OSError) as error:
    print(f"jaxagent.envs.search: error: {error}", file=sys.stderr)
    return 2
  return 0


def build_command(args: argparse.Namespace) -> None:
  corpus = from_packages(population=args.population)
  write(corpus, args.folder)
  hops = [question.hops for question in corpus.questions]
  counts = ", ".join(f"{hops.count(h)} of {h} hops" for h in sorted(set(hops)))
  print(f"{len(corpus.documents)} documents and {len(corpus.questions)} questions ({counts}) are in {args.folder}")
  for name, licence in corpus.sources.items():
    print(f"  {name}: {licence}")


def vectors_command(args: argparse.Namespace) -> None:
  vectors = encoded(read(args.folder).documents, _encoder(args.encoder))
  np.save(Path(args.folder, "vectors.npy"), vectors)
  print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers are in {Path(args.folder, 'vectors.npy')}")


def recall_command(args: argparse.Namespace) -> None:
  corpus = read(args.folder)
  dense = Dense(corpus.documents, _encoder(args.encoder), vectors=load_vectors(args.folder))
  asked = _spread(corpus, args.queries)
  print(f"IVF{dense.lists},SQ8 of {len(corpus.documents)} documents, {len(asked)} questions, top {args.top_k}")
  for probes in PROBES:
    print(f"  {probes:3d} probes: recall {recall(dense, asked, top_k=args.top_k, probes=probes):.4f}")


def _encoder(name: str):
  return as_encode(attribute(name, what="--encoder"), what="--encoder")


def _spread(corpus: Corpus, count: int) -> list[str]:
  """`count` questions at equal distances."""
  texts = [question.text for question in corpus.questions]
  return texts[:: max(len(texts) // count, 1)][:count]


if __name__ == "__main__":
  sys.exit(main())
