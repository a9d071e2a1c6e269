import asyncio
import sys

import pytest

from jaxagent.config import Env
from jaxagent.envs.calculator import Calculator
from jaxagent.envs.registry import resolve

MODULE = """
class Guess:
  tool_format = None
  def __init__(self, secret=3):
    self.secret = secret
  async def reset(self, seed):
    return {0: seed}
  async def step(self, actions): ...
  async def close(self): ...

class Tasks:
  def __init__(self, n): self.n = n
  def size(self, split): return self.n
  def environment(self, split, index): return Guess(), index

def tasks(n=2): return Tasks(n)
def wrong(): return 3
number = 4
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  (tmp_path / "my_env_module.py").write_text(MODULE)
  (tmp_path / "broken_env_module.py").write_text("import not_there_at_all")
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_names():
  assert resolve(Env()) == Calculator()
  assert resolve(Env("calculator", {"digits": 1})).digits == 1


@pytest.mark.parametrize(
  "env, message",
  [
    (Env("calculater"), "did you mean 'calculator'"),
    (Env("calculator", {"digit": 1}), "did you mean 'digits'"),
    (Env("dataset"), "needs the option 'path'"),
    (Env("no_such_module:X"), "no module 'no_such_module'"),
    (Env("my_env_module:X"), "no attribute 'X'"),
    (Env("my_env_module:number"), "must be an environment class or return tasks"),
    (Env("my_env_module:wrong"), "must give tasks"),
    (Env("my_env_module:Guess", {"x": 1}), "no option 'x'"),
    (Env("my_env_module:Tasks"), "needs the option 'n'"),
  ],
)
def test_what_cannot_be_resolved(module, env, message):
  with pytest.raises(ValueError, match=message):
    resolve(env)


def test_an_error_inside_the_module_is_shown_as_it_is(module):
  with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
    resolve(Env("broken_env_module:X"))


def test_an_environment_class_gets_fresh_instances_and_seeds_of_its_split(module):
  tasks = resolve(Env("my_env_module:Guess", {"secret": 5}))
  made = [tasks.environment(split, i) for split in ("train", "eval") for i in range(20)]
  assert len({id(e) for e, _ in made}) == 40 and len({seed for _, seed in made}) == 40
  assert made[0][0].secret == 5 and asyncio.run(made[0][0].reset(7)) == {0: 7}
  assert tasks.size("train") is None
  with pytest.raises(ValueError, match="split must be"):
    tasks.environment("test", 0)


@pytest.mark.parametrize("name, options", [("my_env_module:tasks", {}), ("my_env_module:Tasks", {"n": 2})])
def test_a_factory_of_tasks(module, name, options):
  assert resolve(Env(name, options)).size("train") == 2
