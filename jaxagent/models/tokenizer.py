"""Text to ids and back, where the text of a special token is never taken for the token unless the caller asks."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A `tokenizers.Tokenizer` that adds nothing, pads nothing and truncates nothing.

  Special tokens are those the file marks as special (`<|im_end|>`); added tokens that it does not mark (Qwen's
  `<think>` and `<tool_call>`) are ordinary vocabulary and are recognised everywhere. Errors: ValueError for a tokenizer
  that encodes the beginning of a text differently from what follows a special token, so that turns cannot be appended.
  """

  inner: tokenizers.Tokenizer
  eos_id: int | None = None
  pad_id: int | None = None
  bos_id: int | None = None

  def __post_init__(self):
    inner = tokenizers.Tokenizer.from_str(self.inner.to_str())
    inner.no_padding()
    inner.no_truncation()
    _check_cuts(inner)
    inner.encode_special_tokens = True
    object.__setattr__(self, "inner", inner)

  @functools.cached_property
  def vocab_size(self) -> int:
    """Largest id + 1: the rows that an embedding needs."""
    return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def special(self) -> dict[str, int]:
    """Special tokens: text -> id."""
    return {token.content: i for i, token in sorted(self.inner.get_added_tokens_decoder().items()) if token.special}

  def encode(self, text: str) -> list[int]:
    """Ids of plain text: `<|im_end|>` written in it becomes several ordinary tokens. Adds no special tokens."""
    return self.inner.encode(text, add_special_tokens=False).ids

  def encode_markup(self, text: str, guard: str = "") -> list[int]:
    """Ids of a rendered template: special tokens are recognised, except where the character `guard` stands before one.

    Guards are removed before anything is encoded. Special tokens split the text, so a text may be cut before or after
    one and encoded in parts.
    """
    ids: list[int] = []
    start = 0
    for match in self.special_pattern(guard).finditer(text):
      ids += [*self._plain(text[start : match.start()], guard), self.special[match["token"]]]
      start = match.end()
    return ids + self._plain(text[start:], guard)

  @functools.lru_cache(maxsize=64)  # noqa: B019
  def special_pattern(self, guard: str = "") -> re.Pattern:
    """Matches a special token (group "token") that does not follow `guard`, with the white space that it swallows."""
    added = {token.content: token for token in self.inner.get_added_tokens_decoder().values() if token.special}
    if not added:
      return re.compile(r"(?!)(?P<token>)")
    names = sorted(added, key=lambda name: (-len(name), name))
    before = f"(?<!{re.escape(guard)})" if guard else ""
    left = "|".join(re.escape(name) for name in names if added[name].lstrip)
    right = "|".join(f"(?<={re.escape(name)})" for name in names if added[name].rstrip)
    swallow_left = rf"(?:\s*(?={before}(?:{left})))?" if left else ""
    swallow_right = rf"(?:(?:{right})\s*)?" if right else ""
    return re.compile(f"{swallow_left}{before}(?P<token>{'|'.join(map(re.escape, names))}){swallow_right}")

  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids, special tokens included; an id that no token has (a padded embedding) reads U+FFFD."""
    parts, run = [], []
    for i in map(int, ids):
      if i >= 0 and self.inner.id_to_token(i) is not None:
        run.append(i)
      else:
        parts += [self._text(run), "\ufffd"]
        run = []
    return "".join([*parts, self._text(run)])

  def token(self, i: int | None) -> str | None:
    """The text of one token as the vocabulary spells it."""
    return None if i is None else self.inner.id_to_token(i)

  def _text(self, ids: list[int]) -> str:
    return self.inner.decode(ids, skip_special_tokens=False) if ids else ""

  def _plain(self, text: str, guard: str) -> list[int]:
    return self.encode(text.replace(guard, "") if guard else text) if text else []


def _check_cuts(inner: tokenizers.Tokenizer) -> None:
  special = [(token.content, i) for i, token in inner.get_added_tokens_decoder().items() if token.special]
  if not special:
    return
  name, i = special[0]
  whole, part = (inner.encode(text, add_special_tokens=False).ids for text in (f"a{name}a", "a"))
  if whole != [*part, i, *part]:
    raise ValueError(
      f"the tokenizer encodes 'a' as {part} but 'a{name}a' as {whole}: it treats the beginning of a text differently,"
      " so turns cannot be appended; use a byte-level tokenizer"
    )


def byte_tokenizer() -> Tokenizer:
  """Token b is byte b; 256 is <|endoftext|> (padding), 257 <|im_start|>, 258 <|im_end|> (end of turn)."""
  inner = tokenizers.Tokenizer(models.BPE(vocab={c: b for b, c in enumerate(byte_characters())}, merges=[]))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  inner.decoder = decoders.ByteLevel()
  names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
  inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
  return Tokenizer(inner, eos_id=258, pad_id=256)


def byte_characters() -> list[str]:
  """How byte-level vocabularies spell byte b: itself where it prints in Latin-1, else the next one from U+0100."""
  prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  hidden = [b for b in range(256) if b not in prints]
  return [chr(b) if b in prints else chr(256 + hidden.index(b)) for b in range(256)]


def load_tokenizer(folder: str | Path) -> Tokenizer:
  """The tokenizer of a Hugging Face folder: `tokenizer.json`, and special names from `tokenizer_config.json`."""
  folder = Path(folder)
  path = folder / "tokenizer.json"
  if not path.is_file():
    raise ValueError(f"{folder} has no tokenizer.json; save a fast tokenizer there, or set model.tokenizer")
  try:
    inner = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises bare Exception
    raise ValueError(f"{path} is not a tokenizer: {error}") from error
  config = read_json(folder / "tokenizer_config.json", default={})
  return Tokenizer(inner, **{f"{role}_id": _named_id(inner, config, role, path) for role in ("eos", "pad", "bos")})


def _named_id(inner: tokenizers.Tokenizer, config: dict, role: str, path: Path) -> int | None:
  name = config.get(f"{role}_token")
  name = name["content"] if isinstance(name, dict) else name
  if name is None:
    return None
  token = inner.token_to_id(name)
  if token is None:
    raise ValueError(f"{role}_token {name!r} of tokenizer_config.json is not in the vocabulary of {path}")
  return token


def read_json(path: Path, default: dict | None = None) -> dict:
  """A JSON object from a file; `default` where there is none. Anything else in the file is a ValueError."""
  if not path.is_file():
    if default is None:
      raise FileNotFoundError(f"{path} does not exist")
    return default
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
  return value
