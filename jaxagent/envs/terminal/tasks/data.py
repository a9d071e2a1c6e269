"""Data wrangling: aggregate, join, count, sort."""

import random

from jaxagent.envs.terminal.tasks.task import Content, Exists, Task, lines_of, word, words


def totals(rng: random.Random) -> Task:
  shops = sorted(words(rng, 10))
  rows = [(rng.randint(1, 28), shop, rng.randint(1, 99)) for shop in shops * 6]
  rng.shuffle(rows)
  table = "day,shop,amount\n" + "".join(f"{day},{shop},{amount}\n" for day, shop, amount in rows)
  lines = ["shop,total", *(f"{shop},{sum(amount for _, s, amount in rows if s == shop)}" for shop in shops)]
  return Task(
    "data/totals",
    "sales.csv has the columns day, shop and amount. Write totals.csv: the header shop,total and then one line for each"
    " shop, sorted by its name, with the sum of its amounts. Leave sales.csv as it is.",
    (
      "{ echo shop,total; awk -F, 'NR>1{t[$2]+=$3} END{for(s in t) print s\",\"t[s]}' sales.csv | sort; }"
      " > totals.csv",
    ),
    lines_of("totals.csv", lines, skip=1),
    files=(("sales.csv", table),),
    guards=(Content("sales.csv", table),),
  )


def join(rng: random.Random) -> Task:
  people = [(f"{n:04d}", name) for n, name in zip(rng.sample(range(10000), 20), words(rng, 20))]
  scores = {number: rng.randint(0, 999) for number, _ in people}
  strangers = {f"{n:04d}": rng.randint(0, 999) for n in rng.sample(range(10000), 10)}
  scored = list((strangers | scores).items())
  rng.shuffle(scored)
  files = (
    ("people.txt", "".join(f"{number} {name}\n" for number, name in people)),
    ("scores.txt", "".join(f"{number} {score}\n" for number, score in scored)),
  )
  return Task(
    "data/join",
    "people.txt has lines 'number name', scores.txt has lines 'number score'. Write joined.txt: for every number of"
    " people.txt a line 'number name score', sorted by number. Leave both as they are.",
    ("sort people.txt > /tmp/p; sort scores.txt > /tmp/s; join /tmp/p /tmp/s > joined.txt",),
    lines_of("joined.txt", [f"{number} {name} {scores[number]}" for number, name in sorted(people)]),
    files=files,
    guards=tuple(Content(*file) for file in files),
  )


def errors(rng: random.Random) -> Task:
  hosts = words(rng, 8)
  counts = rng.sample(range(2, 20), 8)
  lines = [("ERROR", host) for host, count in zip(hosts, counts) for _ in range(count)]
  lines += [(rng.choice(("INFO", "WARN")), rng.choice(hosts)) for _ in range(60)]
  rng.shuffle(lines)
  log = "".join(f"{8 + i // 60:02d}:{i % 60:02d} {level} {host} {word(rng)}\n" for i, (level, host) in enumerate(lines))
  top = sorted(zip(counts, hosts), reverse=True)[:5]
  return Task(
    "data/errors",
    "app.log has lines 'time level host message'. Write top.txt: the five hosts with the most lines of level ERROR,"
    " the most first, as lines 'count host'. Leave app.log as it is.",
    (
      'awk \'$2=="ERROR"{n[$3]++} END{for(h in n) print n[h], h}\' app.log | sort -rn > /tmp/t;'
      " head -n 5 /tmp/t > top.txt",
    ),
    lines_of("top.txt", [f"{count} {host}" for count, host in top]),
    files=(("app.log", log),),
    guards=(Content("app.log", log),),
  )


def total(rng: random.Random) -> Task:
  name, out = words(rng, 2, 3)
  numbers = [rng.randint(1, 9) for _ in range(3)]
  facts = (Exists(out), Content(out, str(sum(numbers))))
  solution = (f"awk '{{t+=$1}}END{{print t}}' {name}>{out}",)
  content = "".join(f"{n}\n" for n in numbers)
  return Task("data/total", f"Write the sum of {name} to {out}", solution, facts, files=((name, content),))


def order(rng: random.Random) -> Task:
  name, out, *lines = words(rng, 7, 3)
  content = "".join(f"{line}\n" for line in lines)
  facts = lines_of(out, sorted(lines))
  return Task("data/order", f"Sort {name} into {out}", (f"sort {name}>{out}",), facts, files=((name, content),))


def pick(rng: random.Random) -> Task:
  name, out, *lines = words(rng, 8, 3)
  n = rng.randint(1, len(lines))
  content = "".join(f"{line}\n" for line in lines)
  facts = (Exists(out), Content(out, lines[n - 1]))
  solution = (f"sed -n {n}p {name}>{out}",)
  return Task("data/pick", f"Write line {n} of {name} to {out}", solution, facts, files=((name, content),))


FULL = (totals, join, errors)
TINY = (total, order, pick)
