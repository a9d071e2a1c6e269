"""Configuration files: set, add and remove settings, and change nothing else."""

import json
import random

from jaxagent.envs.terminal.tasks.task import Content, Others, Setting, Task, parsed, word, words


def ini(rng: random.Random) -> Task:
  sections, keys = words(rng, 4), words(rng, 5)
  text = "\n".join(
    f"[{section}]\n" + "".join(f"{key} = {rng.randint(0, 99)}\n" for key in keys) for section in sections
  )
  chosen = rng.sample([(section, key) for section in sections for key in keys], 10)
  changes = {place: str(rng.randint(100, 999)) for place in chosen}
  listing = "\n".join(f"[{section}] {key} = {value}" for (section, key), value in changes.items())
  edits = "; ".join(rf"/^\[{s}\]/,/^$/ s/^{key} = .*/{key} = {value}/" for (s, key), value in changes.items())
  prompt = f"app.ini has sections with the same keys in each. Make these changes and no others.\n{listing}"
  return _change("config/ini", prompt, (f"sed -i '{edits}' app.ini",), "app.ini", "ini", text, changes)


def env(rng: random.Random) -> Task:
  names = [name.upper() for name in words(rng, 16)]
  text = "# settings\n" + "".join(f"{name}={rng.randint(0, 99)}\n" for name in names[:13])
  changed = {name: str(rng.randint(100, 999)) for name in rng.sample(names[:10], 5)}
  added = {name: str(rng.randint(100, 999)) for name in names[13:]}
  removed = names[11:13]
  changes = {(name,): v for name, v in (changed | added).items()} | {(name,): None for name in removed}
  pairs = ", ".join(f"{name}={v}" for name, v in (changed | added).items())
  edits = "; ".join(f"s/^{name}=.*/{name}={v}/" for name, v in changed.items())
  prompt = (
    f"In settings.env, set {pairs}; those that are not there yet are to be added. Remove {' and '.join(removed)}."
    " Leave all others as they are."
  )
  solution = (
    f"sed -i '{edits}' settings.env",
    f"printf '%s\\n' {' '.join(f'{name}={v}' for name, v in added.items())} >> settings.env",
    f"sed -i '{'; '.join(f'/^{name}=/d' for name in removed)}' settings.env",
  )
  return _change("config/env", prompt, solution, "settings.env", "env", text, changes)


def json_values(rng: random.Random) -> Task:
  groups = words(rng, 4)
  names = iter(words(rng, 16, 7))
  tree = {group: {next(names): rng.randint(0, 99) for _ in range(4)} for group in groups}
  text = json.dumps(tree, indent=2) + "\n"
  chosen = rng.sample([(group, name) for group in groups for name in tree[group]], 5)
  changes = {place: rng.randint(100, 999) for place in chosen}
  listing = ", ".join(f"{'.'.join(place)} to {value}" for place, value in changes.items())
  edits = "; ".join(f's/"{name}": [0-9]*/"{name}": {value}/' for (_, name), value in changes.items())
  prompt = f"In config.json change {listing}. It must stay valid JSON; leave all other values as they are."
  return _change("config/json", prompt, (f"sed -i '{edits}' config.json",), "config.json", "json", text, changes)


def put(rng: random.Random) -> Task:
  names = words(rng, 3, 3)
  old, new = rng.sample(range(10, 100), 2)
  which = rng.choice(names)
  text = "".join(f"{name}={old}\n" for name in names)
  solution = (f"sed -i s/{which}=.*/{which}={new}/ c",)
  return _change("config/put", f"In c set {which}={new}", solution, "c", "env", text, {(which,): str(new)})


def append(rng: random.Random) -> Task:
  first, second, name = words(rng, 3, 4)
  value = rng.randint(1, 99)
  facts = (Content(name, f"{first}=1\n{second}={value}"),)
  solution = (f"echo {second}={value}>>{name}",)
  return Task("config/append", f"Append {second}={value} to {name}", solution, facts, files=((name, f"{first}=1\n"),))


def drop(rng: random.Random) -> Task:
  names = words(rng, 3, 3)
  path, which = word(rng, 4), rng.choice(names)
  text = "".join(f"{name}={rng.randint(1, 9)}\n" for name in names)
  solution = (f"sed -i /{which}/d {path}",)
  return _change("config/drop", f"Remove {which} from {path}", solution, path, "env", text, {(which,): None})


def _change(
  name: str, prompt: str, solution: tuple[str, ...], path: str, format: str, text: str, changes: dict
) -> Task:
  """`changes` of the settings in `text`, which is the file `path`: new values, None to remove; all others stay."""
  facts = tuple(Setting(path, format, place, value) for place, value in changes.items())
  kept = tuple((place, value) for place, value in parsed(text, format).items() if place not in changes)
  guards = (Others(path, format, frozenset(changes), kept),)
  return Task(name, prompt, solution, facts, files=((path, text),), guards=guards)


FULL = (ini, env, json_values)
TINY = (put, append, drop)
