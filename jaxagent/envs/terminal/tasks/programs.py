"""Small programs, in bash: each is run on inputs that the agent never sees, where nothing of the task can be read."""

import random
from collections.abc import Callable

from jaxagent.envs.terminal.tasks.task import Case, Task, word

# words, awk condition, Python
KEEP = {
  "even": ("x % 2 == 0", lambda x, k: x % 2 == 0), "odd": ("x % 2 == 1", lambda x, k: x % 2 == 1),
  "greater than {k}": ("x > {k}", lambda x, k: x > k), "less than {k}": ("x < {k}", lambda x, k: x < k),
  "divisible by 3": ("x % 3 == 0", lambda x, k: x % 3 == 0),
}  # fmt: skip
CHANGE = {
  "multiply each by {a}": ("x * {a}", lambda x, a: x * a), "add {a} to each": ("x + {a}", lambda x, a: x + a),
  "square each": ("x * x", lambda x, a: x * x),
}  # fmt: skip
REPORT = {
  "their sum (0 if there are none)": ("s += y", "print s + 0", lambda ys: sum(ys)),
  "the largest (0 if there are none)": ("if (y > s) s = y", "print s + 0", lambda ys: max(ys, default=0)),
  "how many are greater than 50": ("s += (y > 50)", "print s + 0", lambda ys: sum(y > 50 for y in ys)),
}  # fmt: skip


def stream(rng: random.Random) -> Task:
  keep, change, report = rng.choice(list(KEEP)), rng.choice(list(CHANGE)), rng.choice(list(REPORT))
  k, a = rng.randint(10, 60), rng.randint(2, 9)
  names = {"k": k, "a": a}
  (test, kept), (formula, changed), (each, end, reported) = KEEP[keep], CHANGE[change], REPORT[report]
  body = f"y = {formula.format(**names)}; {each}"
  awk = f"{{ x = $1 }} {test.format(**names)} {{ {body} }} END {{ {end} }}"
  cases = []
  for _ in range(10):
    xs = [rng.randint(0, 99) for _ in range(rng.randint(3, 12))]
    answer = reported([changed(x, a) for x in xs if kept(x, k)])
    cases.append(Case("run.sh", (), "".join(f"{x}\n" for x in xs), str(answer)))
  return Task(
    "programs/stream",
    "Write run.sh, a bash script (run as: bash run.sh) that reads numbers from 0 to 99 from its input, one a line. Of"
    f" those that are {keep.format(**names)}, {change.format(**names)}, then print {report}. It is tried on its own,"
    " on inputs you do not see.",
    (f"cat > run.sh <<'END'\nawk '{awk}'\nEND",),
    cases=tuple(cases),
  )


def branch(rng: random.Random) -> Task:
  a, b, c = rng.sample(range(2, 30), 3)
  text = f"A*{a} - B if A is greater than B, and B*{b} + A + {c} if not"
  cases = _cases("run.sh", rng, 10, lambda x, y: x * a - y if x > y else y * b + x + c)
  return Task(
    "programs/branch",
    f"Write run.sh, a bash script. Run as 'bash run.sh A B' with two whole numbers, it prints {text}. It is tried on"
    " its own, on inputs you do not see.",
    (f"echo 'if [ $1 -gt $2 ]; then echo $(($1*{a}-$2)); else echo $(($2*{b}+$1+{c})); fi' > run.sh",),
    cases=cases,
  )


def repair(rng: random.Random) -> Task:
  a, b = rng.sample(range(2, 30), 2)
  good = f"n=$(($1*{a}))\nm=$(($2+{b}))\nif [ $n -gt $m ]; then\n  echo $((n-m))\nelse\n  echo $((m-n))\nfi\n"
  bugs = {
    f"$1*{a}": f"$1+{a}", f"$2+{b}": f"$1+{b}", "echo $((n-m))": "echo $((n+m))", "$n -gt $m": "$n -lt $m",
    "echo $((m-n))": "echo $m",
  }  # fmt: skip
  right = rng.choice(list(bugs))
  wrong = bugs[right]
  bad: dict[str, Callable[[int, int], int]] = {
    f"$1*{a}": lambda x, y: abs(x + a - y - b), f"$2+{b}": lambda x, y: abs(x * a - x - b),
    "echo $((n-m))": lambda x, y: x * a + y + b if x * a > y + b else y + b - x * a,
    "$n -gt $m": lambda x, y: -abs(x * a - y - b),
    "echo $((m-n))": lambda x, y: x * a - y - b if x * a > y + b else y + b,
  }  # fmt: skip
  broken = good.replace(right, wrong)
  cases = _cases("run.sh", rng, 10, lambda x, y: abs(x * a - y - b), unlike=bad[right])
  return Task(
    "programs/repair",
    f"'bash run.sh A B' should print the difference between A*{a} and B+{b}, never negative. It has one mistake: find"
    " it and mend run.sh. It is tried on its own, on inputs you do not see.",
    (f"cat > run.sh <<'END'\n{good}END",),
    cases=cases,
    files=(("run.sh", broken),),
  )


def times(rng: random.Random) -> Task:
  sign, k = rng.choice("*+-"), rng.randint(2, 99)
  act = {"*": lambda x, _: x * k, "+": lambda x, _: x + k, "-": lambda x, _: x - k}[sign]
  cases = _cases("f.sh", rng, 4, act, arguments=1)
  solution = (f"echo 'echo $(($1{sign}{k}))'>f.sh",)
  return Task("programs/times", f"Write f.sh: bash f.sh N prints N{sign}{k}", solution, cases=cases)


def say(rng: random.Random) -> Task:
  said, names = word(rng, 4), [word(rng, 3) for _ in range(4)]
  cases = tuple(Case("f.sh", (name,), "", f"{name} {said}") for name in names)
  solution = (f"echo 'echo $1 {said}'>f.sh",)
  return Task("programs/say", f"Write f.sh: bash f.sh X prints X {said}", solution, cases=cases)


def change(rng: random.Random) -> Task:
  old, new = rng.sample(range(10, 100), 2)
  cases = _cases("f.sh", rng, 4, lambda x, _: x + new, arguments=1)
  return Task(
    "programs/change",
    f"bash f.sh N prints N+{old}. Make it print N+{new}",
    (f"sed -i s/{old}/{new}/ f.sh",),
    cases=cases,
    files=(("f.sh", f"echo $(($1+{old}))\n"),),
  )


def _cases(
  script: str,
  rng: random.Random,
  n: int,
  act: Callable[[int, int], int],
  *,
  arguments: int = 2,
  unlike: Callable[[int, int], int] | None = None,
) -> tuple[Case, ...]:
  """n distinct cases, all of which a program that acts `unlike` fails."""
  found: dict[tuple[str, ...], Case] = {}
  while len(found) < n:
    x, y = rng.randint(1, 99), rng.randint(1, 99)
    if unlike is None or unlike(x, y) != act(x, y):
      given = (str(x), str(y))[:arguments]
      found[given] = Case(script, given, "", str(act(x, y)))
  return tuple(found.values())


FULL = (stream, branch, repair)
TINY = (times, say, change)
