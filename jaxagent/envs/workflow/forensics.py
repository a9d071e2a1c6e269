"""Log forensics: logins from several hosts, with local clocks, user ids, replayed and lost lines, and one intruder."""

import random
from dataclasses import dataclass

from jaxagent.envs.workflow.draft import Draft
from jaxagent.envs.workflow.world import (
  Corruption,
  Domain,
  Files,
  change_cell,
  drop_row,
  keys,
  record,
  repeat_row,
  rows,
  table,
)

USERS = ("ana", "bo", "cy", "dee", "eli", "flo")
HOSTS = ("db", "web", "mail")
GUESSES = 3  # failures on one user before the intruder is let in; nobody else fails so often and is then let in


@dataclass(frozen=True)
class World:
  hosts: tuple[tuple[str, int], ...]  # host, seconds that its clock is ahead
  users: tuple[tuple[str, str], ...]  # uid, name
  events: tuple[tuple[str, int, str, str, str, str], ...]  # id, time, host, user, event, address; in order of time
  saved: tuple[str, ...]  # ids


def world(rng: random.Random, count: int) -> World:
  users = tuple(zip(map(str, rng.sample(range(100, 1000), 3)), rng.sample(USERS, 3)))
  names = [name for _, name in users]
  addresses = [f"10.0.{a}.{b}" for a, b in (divmod(n, 250) for n in rng.sample(range(250, 2500), 4))]
  intruder, victim = addresses.pop(), rng.choice(names)
  attack = [(victim, "fail", intruder)] * GUESSES + [(victim, "accept", intruder)]
  homes = dict(zip(names, addresses))
  others = [_ordinary(rng, homes) for _ in range(max(0, count - len(attack)))]
  places = sorted(rng.sample(range(len(attack) + len(others)), len(attack)))
  for place, event in zip(places, attack):
    others.insert(place, event)
  times = sorted(rng.sample(range(1000, 1000 + 60 * len(others)), len(others)))
  events = tuple((f"e{i}", time, rng.choice(HOSTS), *event) for i, (time, event) in enumerate(zip(times, others), 1))
  saved = rng.sample([event[0] for event in events], (len(events) + 1) // 2)
  hosts = tuple((host, rng.choice((-1, 1)) * rng.randint(5, 95)) for host in HOSTS)
  return World(hosts, users, events, tuple(sorted(saved, key=lambda i: int(i[1:]))))


def _ordinary(rng: random.Random, homes: dict[str, str]) -> tuple[str, str, str]:
  """A user at home, let in or leaving; or failing at another's account, which never ends in being let in."""
  name = rng.choice(sorted(homes))
  if rng.random() < 0.3:
    other = rng.choice(sorted(set(homes) - {name}))
    return other, "fail", homes[name]
  return name, rng.choice(("accept", "leave")), homes[name]


def render(w: World) -> Files:
  address, user, time = next(
    (e[5], e[3], e[1]) for e in w.events if e[4] == "accept" and _failures(w, e[3], e[5], e[1]) >= GUESSES
  )
  report = {"address": address, "user": user, "time": time, "failures": _failures(w, user, address, time)}
  return {
    "auth.log": table("auth.log", "", w.events),
    "backup.log": table("backup.log", "", (event for event in w.events if event[0] in w.saved)),
    "hosts.csv": table("hosts.csv", "host,ahead", w.hosts),
    "users.csv": table("users.csv", "uid,user", w.users),
    "report.json": record(report),
  }


def _failures(w: World, user: str, address: str, before: int) -> int:
  return sum(e[4] == "fail" and (e[3], e[5]) == (user, address) and e[1] < before for e in w.events)


def parse(files: Files) -> World:
  return World(
    tuple((host, int(ahead)) for host, ahead in rows("hosts.csv", files["hosts.csv"])),
    tuple((uid, user) for uid, user in rows("users.csv", files["users.csv"])),
    tuple((i, int(time), *rest) for i, time, *rest in rows("auth.log", files["auth.log"])),
    tuple(keys("backup.log")(files)),
  )


def _local_time(files: Files, key: str, rng: random.Random) -> Files:
  ahead = dict(rows("hosts.csv", files["hosts.csv"]))
  host = next(row[2] for row in rows("auth.log", files["auth.log"]) if row[0] == key)
  return change_cell("auth.log", 1, lambda cell, rng: f"{int(cell) + int(ahead[host])}L")(files, key, rng)


def _user_id(files: Files, key: str, rng: random.Random) -> Files:
  uid = {user: uid for uid, user in rows("users.csv", files["users.csv"])}
  return change_cell("auth.log", 3, lambda cell, rng: uid[cell])(files, key, rng)


def _solve(draft: Draft) -> None:
  ahead, name = dict(draft.records("hosts.csv")), dict(draft.records("users.csv"))
  draft.map_cells("auth.log", lambda c: [c[0], _true_time(c[1], ahead[c[2]]), *c[2:]])
  draft.map_cells("auth.log", lambda c: [*c[:3], name.get(c[3], c[3]), *c[4:]])
  draft.drop_repeats("auth.log")
  draft.restore("auth.log", "backup.log")
  failures: dict[tuple[str, str], int] = {}
  for _, time, _, user, event, address in sorted(draft.records("auth.log"), key=lambda c: int(c[1])):
    pair = user, address
    if event == "fail":
      failures[pair] = failures.get(pair, 0) + 1
    elif event == "accept" and failures.get(pair, 0) >= GUESSES:
      draft.write("report.json", {"address": address, "user": user, "time": int(time), "failures": failures[pair]})
      return


def _true_time(time: str, ahead: str) -> str:
  return str(int(time[:-1]) - int(ahead)) if time.endswith("L") else time


FORENSICS = Domain(
  name="forensics",
  summary="Repair auth.log (id time host user event address). backup.log is right, but holds only some lines.",
  report="report.json",
  report_rule=(
    f'An intruder\'s address failed at least {GUESSES} times on one user and was then accepted. Then write report.json:'
    ' {"address": ..., "user": ..., "time": of the accept, "failures": their number before it}.'
  ),
  corruptions=(
    Corruption(
      "clocks", "auth.log", "A time that ends in L is by the host's own clock: hosts.csv says how far it is ahead.",
      keys("auth.log"), _local_time,
    ),
    Corruption("users", "auth.log", "Users have names; users.csv gives those of uids.", keys("auth.log"), _user_id),
    Corruption("replays", "auth.log", "A line is there once.", keys("auth.log"), repeat_row("auth.log")),
    Corruption(
      "lost", "auth.log", "Lines of backup.log that are not in auth.log were lost: add them.", keys("backup.log"),
      drop_row("auth.log"), ("replays",),
    ),
  ),
  world=world,
  render=render,
  parse=parse,
  solve=_solve,
)  # fmt: skip
