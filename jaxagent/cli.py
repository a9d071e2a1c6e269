"""The command line, one subcommand for each function of `jaxagent.run`."""

import argparse
import re
import sys
from collections.abc import Sequence

EXIT_USER = 2
EXIT_INTERRUPTED = 130

TRAIN = """\
Train by a configuration. Any of its keys can be set on the command line: --rollout.samples 4 --seed=1.
`jaxagent config --keys` lists the keys. Ctrl-C and SIGTERM save a checkpoint, then stop."""

SFT = """\
Supervised fine-tuning by the section sft: on the environment's demonstrations, or on the rollouts of a run, filtered.
What it leaves is a run: train with --run.init_from RUN begins there. Keys of the configuration can be set as in train.
sft.steps steps are taken and run.steps is 0."""

FUNNEL = """\
Alternates edits of a text for the policy (skills, a prompt) with updates that teach the policy what the text gained.
Held-out tasks accept or refuse both. Keys of the configuration can be set as in train."""

SERVE = """\
Answer OpenAI-compatible HTTP requests: /v1/chat/completions, /v1/completions, /v1/models, and /health.
A request can bring token ids (prompt, prompt_token_ids) and ask for them (return_token_ids)."""

REFERENCE_STATS = """\
Sample the configuration's model on its training tasks, with thinking and without, and write each task's accuracy and
mean number of tokens to a file: what the environment hybrid_reasoning reads as `reference`. Keys of the configuration
can be set as in train."""

PLAN = """\
Compiles the train step, the scorer, prefill and decode for a topology by its own compiler; nothing is allocated or run.
Prints whether each fits a device's memory, what fills it, the collectives, and bounds on the time from below."""


def parser() -> argparse.ArgumentParser:
  root = argparse.ArgumentParser(prog="jaxagent", description="Reinforcement learning for LLM agents in JAX.")
  commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

  def command(name, help, description=None):
    return commands.add_parser(
      name, help=help, description=description or help, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )

  train = command("train", "train by a configuration", TRAIN)
  train.add_argument("config", help="a YAML file")
  train.add_argument(
    "--resume", nargs="?", const="", metavar="RUN", help="continue RUN, or the newest run of this configuration"
  )
  train.add_argument("--profile", type=int, metavar="N", help="write a profiler trace of step N into the run's folder")

  sft = command("sft", "supervised fine-tuning, to start a run from", SFT)
  sft.add_argument("config", help="a YAML file")

  funnel = command("funnel", "edit a text of skills and teach the policy what it gains, in turn", FUNNEL)
  funnel.add_argument("config", help="a YAML file")
  funnel.add_argument(
    "--resume", nargs="?", const="", metavar="RUN", help="continue RUN, or the newest run of this configuration"
  )

  evaluate = command("eval", "evaluate a run's newest checkpoint on held-out tasks")
  evaluate.add_argument("run", help="a run's folder")
  evaluate.add_argument("--step", type=int, help="the checkpoint's step (default: the newest)")

  sample = command("sample", "sample from a run or a model")
  sample.add_argument("source", metavar="RUN_OR_MODEL", help="a run, a Hugging Face folder or name, or a .gguf")
  sample.add_argument("prompt", help="the user's message")
  sample.add_argument("--system", help="a system message")
  sample.add_argument("-n", type=int, default=1, help="samples")
  sample.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
  sample.add_argument("--top-p", type=float, default=1.0)
  sample.add_argument("--top-k", type=int, default=0, help="0 keeps all")
  sample.add_argument("--max-tokens", type=int, default=128)
  sample.add_argument("--seed", type=int, default=0)

  serve = command("serve", "answer OpenAI-compatible HTTP requests with a run or a model", SERVE)
  serve.add_argument("source", metavar="MODEL", help="a run, a Hugging Face folder or name, or a .gguf")
  serve.add_argument("--host", default="127.0.0.1", help="an address to listen at (default: this machine only)")
  serve.add_argument("--port", type=int, default=8000, help="0: any that is free")
  serve.add_argument("--slots", type=int, default=8, help="sequences that are decoded at once")
  serve.add_argument("--capacity", type=int, default=4096, help="tokens of a prompt and its answer")
  serve.add_argument("--api-key", metavar="KEY", help="needed where --host is not this machine (or JAXAGENT_API_KEY)")
  serve.add_argument("--name", help="the model's name (default: that of the folder or file)")
  serve.add_argument(
    "--tool-format", choices=("hermes", "qwen_xml", "plain"),
    help="how the model writes tool calls (default: a run's own, else hermes)",
  )  # fmt: skip

  stats = command("reference-stats", "what the model does with each task, for hybrid_reasoning", REFERENCE_STATS)
  stats.add_argument("config", help="a YAML file whose environment is hybrid_reasoning")
  stats.add_argument("--tasks", type=int, help="training tasks (default: all)")
  stats.add_argument("--samples", type=int, default=16, help="of each task in each mode")
  stats.add_argument("--output", metavar="FILE", help="default: env.options.reference; must not exist")

  config = command("config", "print the resolved configuration")
  config.add_argument("config", nargs="?", help="a YAML file (default: the built-in defaults)")
  config.add_argument("--keys", action="store_true", help="list every key with its type, default and meaning")

  plan = command("plan", "compile a configuration for chips that are not here, and say what it takes", PLAN)
  plan.add_argument("config", help="a YAML file")
  plan.add_argument("--topology", required=True, help="chips and how they stand: v5e:4x4, v5p:2x2x4, v6e:2x2, h100:8")
  plan.add_argument("--only", nargs="+", metavar="PROGRAM", help="train, score, prefill, decode (default: all)")

  export = command("export", "write a run's newest checkpoint as a Hugging Face folder")
  export.add_argument("run", help="a run's folder")
  export.add_argument("directory", help="the folder to write; must not exist")
  export.add_argument("--step", type=int, help="the checkpoint's step (default: the newest)")

  rollouts = command("rollouts", "look at a run's stored rollouts")
  rollouts.add_argument("run", help="a run's folder")
  rollouts.add_argument("--step", type=int, help="the step to show (default: the newest stored)")
  rollouts.add_argument("--index", type=int, help="the rollout to show in full (default: a line for each)")
  return root


def joined(words: Sequence[str]) -> list[str]:
  """`--a.b -1` as `--a.b=-1`, which argparse does not take for another option."""
  out: list[str] = []
  for word in words:
    if out and re.match(r"--[\w.]+$", out[-1]) and re.match(r"-\.?\d", word):
      out[-1] += f"={word}"
    else:
      out.append(word)
  return out


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; a mistake of the user's is one line on stderr and exit code 2."""
  args, rest = parser().parse_known_args(joined(sys.argv[1:] if argv is None else argv))
  takes_overrides = args.command in ("train", "sft", "funnel", "config", "plan", "eval", "reference-stats")
  if rest and not (takes_overrides and all(not word.startswith("-") or word.startswith("--") for word in rest)):
    parser().error(f"unrecognized arguments: {' '.join(rest)}")
  from jaxagent import run  # heavy: JAX starts here, after --help

  try:
    return getattr(run, f"{args.command.replace('-', '_')}_command")(args, rest) or 0
  except run.USER_ERRORS as error:
    print(f"jaxagent: error: {error}", file=sys.stderr)
    return EXIT_USER
  except KeyboardInterrupt:  # before there was anything to save
    print("jaxagent: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


if __name__ == "__main__":
  sys.exit(main())
