"""Files and folders: create, move, permissions."""

import random

from jaxagent.envs.terminal.tasks.task import Content, Exists, Mode, Moved, Prefix, Task, word, words


def tree(rng: random.Random) -> Task:
  folders = [f"{a}/{b}" for a in words(rng, 3) for b in words(rng, 2)]
  files = {f"{rng.choice(folders)}/{name}.txt": " ".join(words(rng, 3)) for name in words(rng, 10)}
  listing = "\n".join(f"{path}: {content}" for path, content in files.items())
  return Task(
    "files/tree",
    f"Create these ten files in the current folder, each with the one line after the colon.\n{listing}",
    (
      f"mkdir -p {' '.join(folders)}",
      "\n".join(f"echo '{content}' > {path}" for path, content in files.items()),
    ),
    tuple(Content(path, content) for path, content in files.items()),
  )


def by_extension(rng: random.Random) -> Task:
  extensions = words(rng, 4, 3)
  files = [(f"{name}.{rng.choice(extensions)}", " ".join(words(rng, 3)) + "\n") for name in words(rng, 20)]
  return Task(
    "files/by_extension",
    "Move every file of the current folder into a folder named after its extension: a.xyz becomes xyz/a.xyz.",
    ('for f in *.*; do mkdir -p "${f##*.}" && mv "$f" "${f##*.}/"; done',),
    tuple(Moved(path, f"{path.rpartition('.')[2]}/{path}", content) for path, content in files),
    files=tuple(files),
  )


def permissions(rng: random.Random) -> Task:
  for_scripts, for_others = rng.sample([0o755, 0o750, 0o700], 1)[0], rng.sample([0o644, 0o640, 0o440], 1)[0]
  scripts = set(rng.sample(range(20), rng.randint(6, 14)))
  bodies = [("#!/bin/sh\necho {}\n" if i in scripts else "{}\n#!/bin/sh\n").format(word(rng)) for i in range(20)]
  files = tuple(zip(words(rng, 20), bodies))
  return Task(
    "files/permissions",
    f"Some files in the current folder are scripts: their first line starts with #!. Give scripts the mode"
    f" {for_scripts:o} and all other files the mode {for_others:o}. Change nothing else.",
    (
      f"for f in *; do if head -n 1 \"$f\" | grep -q '^#!'; then chmod {for_scripts:o} \"$f\";"
      f' else chmod {for_others:o} "$f"; fi; done',
    ),
    tuple(Mode(path, for_scripts if i in scripts else for_others, body) for i, (path, body) in enumerate(files)),
    files=files,
    setup="chmod 600 *",
  )


def write(rng: random.Random) -> Task:
  name, content = words(rng, 2, 4)
  starts = tuple(Prefix(name, content[:k]) for k in (1, 2, 3))
  facts = (Exists(name), *starts, Content(name, content))
  return Task("files/write", f"Write {content} to the file {name}", (f"echo {content}>{name}",), facts)


def rename(rng: random.Random) -> Task:
  old, new, content = words(rng, 3, 4)
  facts = (Content(new, content), Moved(old, new, content))
  return Task("files/rename", f"Rename {old} to {new}", (f"mv {old} {new}",), facts, files=((old, content),))


def mode(rng: random.Random) -> Task:
  name, digits = word(rng, 4), [rng.choice((4, 5, 6, 7)) for _ in range(3)]
  bits = int("".join(map(str, digits)), 8)
  facts = tuple(Mode(name, bits & mask, "-\n", mask) for mask in (0o700, 0o070, 0o007, 0o777))
  solution = (f"chmod {bits:o} {name}",)
  return Task(
    "files/mode", f"Give {name} the mode {bits:o}", solution, facts, files=((name, "-\n"),), setup=f"chmod 222 {name}"
  )


FULL = (tree, by_extension, permissions)
TINY = (write, rename, mode)
