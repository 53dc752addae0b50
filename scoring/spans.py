"""Where among a trajectory's tokens a part of its text ends: rewards of sentences, steps, lines."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from numbers import Integral
from os.path import commonprefix


def said(trajectory) -> list[tuple[str, str, list[int]]]:
    """What the model wrote, turn by turn: what the prompt began it with, the text, and the places of its tokens.
    `completion_text` of the completion that reward functions get is these texts with line breaks between them."""
    info = trajectory.info
    if turns := info.get("turns"):
        return [(turn.get("begun", ""), turn["text"], list(range(turn["start"], turn["end"]))) for turn in turns]
    return [(info.get("begun", ""), info["completion"], [i for i, mask in enumerate(trajectory.loss_mask) if mask])]


def places_of(ends: list[int], trajectory, decode: Callable) -> list[int]:
    """For each end of a span the token that holds the character before it, the last one if several do.

    ends: characters of `completion_text`, from 1 to its length. decode: the tokenizer's. ValueError where tokens do not
    read as the text, so that no place is known.
    """
    pieces, found, begin = [], {}, 0
    for begun, text, places in said(trajectory):
        pieces.append((begin, begin + len(begun), text, places))
        begin += len(begun) + len(text) + 1  # the line break belongs to the turn before it
    for first, begin, text, places in pieces:
        mine = [end for end in ends if first < end <= begin + len(text) + 1]
        if not (mine and places):
            continue
        ids = [trajectory.token_ids[place] for place in places]
        counters = (counter(ids, text, decode, skip) for skip in (True, False))
        count = next((each for each in counters if each(len(ids)) == len(text)), None)
        if count is None:
            whole = decode(ids)
            raise ValueError(f"its tokens read {whole!r:.200}, not {text!r:.200}: no token can be found for a span")
        for end in mine:
            number = bisect_left(range(len(ids) + 1), min(end - begin, len(text)), key=count)
            found[end] = places[max(number, 1) - 1]
    return [found[end] for end in ends]


def counter(ids: list[int], text: str, decode: Callable, skip: bool) -> Callable[[int], int]:
    """number of tokens -> characters of the text that they make. A character whose last byte is in a later token is not
    among them: until then it decodes to another one."""

    @cache
    def count(number: int) -> int:
        return len(commonprefix([decode(ids[:number], skip_special_tokens=skip), text]))

    return count


def checked_spans(spans, length: int, finite: Callable) -> list[tuple[int, int, float]]:
    """[(start, end, value)]; TypeError or ValueError for anything else. length: characters of the completion's text."""
    form = f"spans are (start, end, value): 0 <= start < end <= {length}, characters of completion_text(completion)"
    if not isinstance(spans, (list, tuple)):
        raise TypeError(f"{form}, in a list")
    checked = []
    for span in spans:
        if not isinstance(span, (list, tuple)) or len(span) != 3:
            raise ValueError(f"{span!r:.80} is no span; {form}")
        start, end, value = span
        whole = all(isinstance(n, Integral) and not isinstance(n, bool) for n in (start, end))
        if not whole or not 0 <= start < end <= length:
            raise ValueError(f"{span!r:.80} is no span; {form}")
        if value is None:
            raise ValueError(f"{span!r:.80}: None is no value of a span, leave it out; {form}")
        checked.append((int(start), int(end), finite(value)))
    return checked
