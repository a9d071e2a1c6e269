import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from jaxagent.models.tokenizer import Tokenizer, byte_characters, byte_tokenizer, load_tokenizer

BYTES = byte_tokenizer()


def test_byte_tokenizer_golden():
  assert BYTES.encode("Az\n") == [65, 122, 10]
  assert BYTES.encode("é") == [0xC3, 0xA9]
  assert BYTES.vocab_size == 259
  assert BYTES.special == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
  assert (BYTES.eos_id, BYTES.pad_id, BYTES.bos_id) == (258, 256, None)
  assert set(byte_characters()) == set(pre_tokenizers.ByteLevel.alphabet())


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=200, deadline=None)
def test_bytes_are_utf8_and_come_back(text):
  assert BYTES.encode(text) == list(text.encode())
  assert BYTES.decode(BYTES.encode(text)) == text


def test_text_of_a_special_token_is_text():
  text = "a<|im_end|>b"
  assert BYTES.encode(text) == list(text.encode())
  assert BYTES.encode_markup(text) == [97, 258, 98]
  assert BYTES.encode_markup("a#<|im_end|>b<|im_end|>", guard="#") == [*b"a<|im_end|>b", 258]
  assert BYTES.decode([97, 258, 98]) == text


def test_decode_shows_what_is_no_token():
  assert BYTES.decode([65, 0xC3]) == "A\ufffd"  # half of a character
  assert BYTES.decode([65, 300, 66, -1]) == "A\ufffdB\ufffd"
  assert BYTES.decode([]) == ""


def test_reads_what_it_saved(tmp_path):
  BYTES.inner.save(str(tmp_path / "tokenizer.json"))
  names = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>", "lstrip": False}, "bos_token": None}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
  again = load_tokenizer(tmp_path)
  assert (again.eos_id, again.pad_id, again.bos_id) == (258, 256, None)
  assert again.special == BYTES.special
  assert again.encode("x<|im_end|>\x00ÿ") == BYTES.encode("x<|im_end|>\x00ÿ")


def test_padding_truncation_and_added_tokens_of_the_file_are_off():
  inner = tokenizers.Tokenizer.from_str(BYTES.inner.to_str())
  inner.enable_padding(length=20)
  inner.enable_truncation(2)
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
  )
  assert Tokenizer(inner).encode("abcd") == [97, 98, 99, 100]
  assert inner.encode("abcd").ids[:2] == [257, 97]  # the caller's own object is untouched


@pytest.mark.parametrize(
  ("token", "text"),
  [
    (AddedToken("<s>", special=True, normalized=False), "a <s> b"),
    (AddedToken("<s>", special=True, normalized=False, lstrip=True), "a  <s> b <s>"),
    (AddedToken("<s>", special=True, normalized=False, rstrip=True), "a <s>  b <s>"),
    (AddedToken("<s>", special=True, normalized=False, lstrip=True, rstrip=True), "<s> a <s> <s> b "),
  ],
)
def test_markup_is_what_the_library_reads(token, text):
  inner = tokenizers.Tokenizer.from_str(BYTES.inner.to_str())
  inner.add_special_tokens([token])
  assert Tokenizer(inner).encode_markup(text) == inner.encode(text, add_special_tokens=False).ids


def test_added_tokens_that_are_not_special_are_vocabulary():
  inner = tokenizers.Tokenizer.from_str(BYTES.inner.to_str())
  inner.add_tokens(["<think>"])
  tokenizer = Tokenizer(inner)
  assert tokenizer.encode("<think>a") == tokenizer.encode_markup("<think>a") == [259, 97]
  assert tokenizer.vocab_size == 260 and "<think>" not in tokenizer.special


def _starts_differently():
  inner = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1}, merges=[]))
  inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
  inner.add_special_tokens(["</s>"])
  return inner


def test_a_tokenizer_that_treats_the_beginning_differently_is_refused():
  with pytest.raises(ValueError, match="beginning of a text"):
    Tokenizer(_starts_differently())


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({}, "has no tokenizer.json"),
    ({"tokenizer.json": "{"}, "is not a tokenizer"),
    ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "is not JSON"),
    ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "must hold a JSON object, got list"),
    ({"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "</s>"}'}, "eos_token '</s>'.*not in the vocab"),
  ],
)
def test_damaged_folders(files, message, tmp_path):
  for name, text in files.items():
    (tmp_path / name).write_text(text if text is not None else BYTES.inner.to_str())
  with pytest.raises(ValueError, match=message):
    load_tokenizer(tmp_path)
