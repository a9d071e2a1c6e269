"""A reward function for `configs/dataset.yaml`."""


def letters(prompt: str, completion: str, answer: str) -> float:
  """Share of the answer's letters that stand at their place; 1 only for the answer itself."""
  if completion == answer:
    return 1.0
  return 0.9 * sum(a == b for a, b in zip(completion, answer)) / max(len(answer), len(completion), 1)
