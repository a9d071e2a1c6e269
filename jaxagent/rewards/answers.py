"""Answers in text to rewards, and the format they must have. Host functions of strings, but for `retrieved_tokens`.

Training and evaluation should call the same functions: a reward that normalises otherwise than the metric is a bug.
"""

import re
import string
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxagent.checks import check_shapes

ARTICLES = re.compile(r"\b(a|an|the)\b")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
QUERY = re.compile(r"<tool_call>.*?<parameter=query>\s*(.*?)\s*</parameter>.*?</tool_call>", re.DOTALL)
PARAMETER = r"<parameter=[^>\s]+>(?:(?!</parameter>).)*</parameter>\s*"
CALL = re.compile(rf"\s*<function=[^>\s]+>\s*(?:{PARAMETER})+</function>\s*", re.DOTALL)


def normalize_answer(text: str) -> str:
  """Lower case, punctuation deleted (not replaced by a space), articles dropped, white space collapsed.

  Source: Rajpurkar et al. 2016, arXiv 1606.05250 (SQuAD). Ours differs: nothing; no Unicode normalisation.
  """
  text = "".join(c for c in text.lower() if c not in string.punctuation)
  return " ".join(ARTICLES.sub(" ", text).split())


def exact_match(answer: str | None, golds: Sequence[str]) -> float:
  """1 if the normalised answer equals some normalised gold, else 0; no answer (None) is 0.

  ValueError: no gold, or one string in place of a list of them.
  """
  _check_golds(golds)
  return float(answer is not None and normalize_answer(answer) in {normalize_answer(gold) for gold in golds})


def token_f1(answer: str | None, golds: Sequence[str]) -> float:
  """2 P R / (P + R) of the normalised words as multisets, the best over the golds; no answer (None) is 0.

  Two empty strings ("the" and "a") give 1, one empty gives 0. Long lists of guesses raise the recall: cap the answer.
  Source: Rajpurkar et al. 2016, arXiv 1606.05250 (SQuAD). HotpotQA's rule for yes and no is not applied.
  """
  _check_golds(golds)
  return 0.0 if answer is None else max(_f1(normalize_answer(answer), normalize_answer(gold)) for gold in golds)


def f1_with_floor(text: str, golds: Sequence[str], *, floor: float = 0.1) -> float:
  """0 if the format is not valid, else F1 of the answer, or `floor` where that is 0. The floor is not added.

  An F1 below the floor stays as it is: 0.05 gives 0.05, as in the source's code (its documentation has the maximum).
  Source: Leiden University's search agent, reward "FLOOR", from its code.
  """
  if not valid_format(text):
    return 0.0
  return token_f1(extract_answer(text), golds) or floor


def search_reward(
  text: str,
  golds: Sequence[str],
  retrieved: Sequence[str] = (),
  *,
  structure: float = 0.2,
  final: float = 0.1,
  retrieval: float = 0.1,
) -> float:
  """Exact match with consolations for format and retrieval.

  | | exact | not exact | no answer |
  |---|---|---|---|
  | valid format | 1 | structure, + retrieval if a gold is in a retrieved block | the same |
  | invalid | 1 - structure | final | 0 |

  Source: Search-R1's shaped reward, Jin et al. 2025, arXiv 2505.15117, as in the Leiden search agent's code.
  """
  answer, valid = extract_answer(text), valid_format(text)
  if exact_match(answer, golds):
    return 1.0 if valid else 1.0 - structure
  if valid:
    blocks = [normalize_answer(block) for block in retrieved]
    found = any(normalize_answer(gold) in block for gold in golds for block in blocks)
    return structure + retrieval * found
  return final if answer is not None else 0.0


def extract_answer(text: str) -> str | None:
  """What stands in the last <answer>...</answer>, stripped; None without one."""
  found = ANSWER.findall(text)
  return found[-1].strip() if found else None


def extract_query(text: str) -> str | None:
  """The `query` parameter of the first tool call that has one; None if it is missing or empty."""
  found = QUERY.search(text)
  return (found.group(1) or None) if found else None


def valid_format(text: str) -> bool:
  """Whether the policy's words are well formed: thinking, nested-XML tool calls, and an answer at the end.

  At least one </think> and no more <think> than those (the template may open the first); as many <tool_call> as
  </tool_call>, each around <function=NAME> with at least one <parameter=NAME>...</parameter>; as many <answer> as
  </answer>, at least one, and the text ends with it. `text` is what the policy wrote, without tool results.
  Source: Leiden University's search agent, from its code.
  """
  calls = TOOL_CALL.findall(text)
  return (
    1 <= text.count("</think>") >= text.count("<think>")
    and text.count("<tool_call>") == text.count("</tool_call>") == len(calls)
    and all(CALL.fullmatch(call) for call in calls)
    and 1 <= text.count("<answer>") == text.count("</answer>")
    and text.rstrip().endswith("</answer>")
  )


def math_match(answer: str | None, gold: str, *, seconds: int = 5) -> float:
  """1 if both parse to equal mathematics (1/2, 0.5 and \\frac{1}{2} are equal), else 0; no answer (None) is 0.

  Parsing and comparing take at most `seconds` each in the main thread, and as long as they need in another.
  ImportError without the `math` extra. ValueError: a gold that does not parse, which no answer could match.
  """
  parse, verify = _math_verify()
  limit = seconds if threading.current_thread() is threading.main_thread() else None
  reference = _parsed(parse, gold, limit)
  if not reference:
    raise ValueError(f"the gold answer {gold!r} does not parse as mathematics; correct the data or use exact_match")
  return float(answer is not None and bool(verify(reference, _parsed(parse, answer, limit), timeout_seconds=limit)))


def retrieved_tokens(
  mask: Bool[Array, "N T"], length: Int[Array, "N"], prefix_length: Int[Array, "N"]
) -> Bool[Array, "N T"]:
  """Tokens after the first prompt that the policy read and did not write: retrieved blocks, tool results, role markers.

  They stay in the context and in no loss, KL, entropy or length: `mask` and this are disjoint.
  Source: Jin et al. 2025, arXiv 2503.09516 (Search-R1). Ours differs: from the sampler's record, not from markers.
  """
  check_shapes(mask=(mask, "N T"), length=(length, "N"), prefix_length=(prefix_length, "N"))
  place = jnp.arange(mask.shape[1])
  return ~jnp.asarray(mask) & (place >= jnp.asarray(prefix_length)[:, None]) & (place < jnp.asarray(length)[:, None])


def _f1(answer: str, gold: str) -> float:
  a, g = answer.split(), gold.split()
  if not a or not g:
    return float(a == g)
  common = sum((Counter(a) & Counter(g)).values())
  return 2 * common / (len(a) + len(g))


def _check_golds(golds) -> None:
  if isinstance(golds, str) or not golds:
    raise ValueError(f"golds must be a list of at least one accepted answer, got {golds!r}")


def _math_verify() -> tuple[Callable, Callable]:
  try:
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]: an extra
  except ImportError as error:
    raise ImportError("math_match needs math-verify: pip install 'jaxagent[math]'") from error
  return parse, verify


def _parsed(parse, text: str, limit: int | None):
  return parse(text, parsing_timeout=limit) or parse(f"${text}$", parsing_timeout=limit)
