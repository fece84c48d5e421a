"""Scores a mathematical answer by comparing its text: `reward.function=math_answer`, the default."""

import re

CHARACTERS_LOOKED_AT = 300
"""Only the end of a response counts, so an answer guessed on the way earns nothing."""

ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_BOXED = "\\boxed{"

# Minerva's normalisation (Lewkowycz et al. 2022, appendix D.1), which the DAPO rule takes over: order matters.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples"),
)
_MARKUP = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def compute_score(
    data_source: str,  # noqa: ARG001  (the signature of every reward function)
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None = None,  # noqa: ARG001
) -> dict[str, float | str]:
    """1 if the answer equals the ground truth after normalisation, else 0 (where the DAPO rule gives -1).

    The answer is what follows the last `Answer:` in the last 300 characters, to the end of its line; without one, the
    content of the last \\boxed{}. Besides the score: `acc`, which equals it, and `pred`, the answer as normalised.
    """
    answer = extract_answer(solution_str[-CHARACTERS_LOOKED_AT:])
    prediction = normalise(answer) if answer is not None else "[none]"
    score = float(answer is not None and prediction == normalise(as_text(ground_truth)))
    return {"score": score, "acc": score, "pred": prediction}


def extract_answer(text: str) -> str | None:
    if answers := ANSWER.findall(text):
        return answers[-1]
    return _last_boxed(text)


def normalise(answer: str) -> str:
    """One spelling for answers that mean the same: no units, dollar signs, spaces or thousands separators."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for removed in (*_UNITS, *_MARKUP):
        answer = answer.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return without_commas if without_commas.isdigit() else answer.strip()


def as_text(ground_truth: object) -> str:
    """Data sets write whole numbers as text, as ints, or as floats when a column had a gap."""
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        return str(int(ground_truth))
    return str(ground_truth)


def _last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} that is closed; braces inside are balanced."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 0
    for position in range(start + len(_BOXED) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(_BOXED) : position]
    return None
