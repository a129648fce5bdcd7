"""Text into the pieces that are spoken one by one: sentences, and parts of sentences that are too long.

Pure. The order of the decisions:
1. Lines are joined into paragraphs: a blank line always ends one, a single line end only where the line does
   not look wrapped (see `_continues`).
2. A paragraph is cut after ends of sentences: `.!?…` and closing quotes before a space; the full-width marks
   of Chinese and Japanese also without one. Abbreviations, initials, list numbers and a following
   lower-case word keep a sentence together (see `_ends_sentence`).
3. A piece with nothing to say (`***`, a lone dash) goes with its neighbour.
4. What is longer than the limit is cut at clauses, else between words, else anywhere but inside a character.

Nothing but white space is ever dropped or moved, unless the text has nothing to say at all: then [].
"""

import re
import unicodedata

_END = re.compile(r"[.!?…。！？．｡‼⁇⁈⁉؟۔।॥]+[\"'”’»›)\]}」』）】〉》〕｣]*")  # noqa: RUF001
_WIDE_ENDS = frozenset("。！？．｡")  # noqa: RUF001  no space follows these
_CLOSERS = "\"'”’»›)]}」』）】〉》〕｣"  # noqa: RUF001
_OPENERS = "\"'“‘«‹([{「『（【〈《〔｢¿¡"  # noqa: RUF001
_CLAUSE = re.compile(r"[,;:—–]+[\"'”’»)\]]*(?=\s)|—|[，、；：]")  # noqa: RUF001
_LIST_MARK = re.compile(r"(?:[-*•·‣–—]|\(?\d{1,3}[.)]|[a-z][.)])\s")  # noqa: RUF001
_SAYS_SOMETHING = frozenset("LN")
_SPOKEN_MARKS = frozenset("%&@#")

# A line this long without an end of sentence was wrapped by an editor, not ended by its author.
_WRAPPED = 50

_TITLE_WORDS = """mr mrs ms mx dr prof st mt ft rev hon fr sr sra srta dra gen col maj capt cpt cmdr lt sgt pvt adm gov
    sen rep pres amb supt messrs mme mlle hr fam ing dipl vs cf viz eg ie ca approx esp incl resp bzw evtl ggf vgl sog"""
_NUMBER_WORDS = """no nos nr vol vols fig figs p pp ch chap sec sect art op ex eq tab ref ver v abs
    jan feb mar apr jun jul aug sep sept oct nov dec"""
# Always followed by what they belong to.
_TITLES = frozenset(_TITLE_WORDS.split())
# An abbreviation only before a number ("No. 5"), else a word of its own ("No. I won't.").
_BEFORE_NUMBER = frozenset(_NUMBER_WORDS.split())


def sentences(text: str, limit: int = 300) -> list[str]:
    """Cut a text into pieces of at most `limit` characters, each a sentence where that is possible.

    White space inside a piece is one space. Returns [] if no character of the text can be spoken.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    whole = [sentence for paragraph in _paragraphs(text) for sentence in _cut_sentences(paragraph)]
    return [part for sentence in _with_neighbours(whole) for part in _cut_long(sentence, limit)]


def speakable(text: str) -> bool:
    """True if a character of the text can be spoken: a letter, a digit, a currency or arithmetic sign."""
    return any(_speakable(character) for character in text)


def _speakable(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in _SAYS_SOMETHING or category in ("Sc", "Sm") or character in _SPOKEN_MARKS


def _paragraphs(text: str) -> list[str]:
    paragraphs: list[str] = []
    lines: list[str] = []  # of the paragraph that is being read, with what joins them
    last = ""
    for raw in text.splitlines():
        line = " ".join(raw.split())
        if last and (not line or not _continues(last, line)):
            paragraphs.append("".join(lines))
            lines = []
        elif last:
            lines.append(_joint(last, line))
        if line:
            lines.append(line)
        last = line
    if lines:
        paragraphs.append("".join(lines))
    return paragraphs


def _continues(line: str, following: str) -> bool:
    """Does a paragraph go on in the next line?

    1. Not before a list item.  2. After an end of sentence: yes, the sentence rules decide about the rest.
    3. Before a lower-case word, and after a comma or dash.  4. After a line that is as long as a wrapped one.
    """
    if _LIST_MARK.match(following):  # (1)
        return False
    end = line.rstrip(_CLOSERS)[-1:]
    if end and _END.fullmatch(end):  # (2)
        return True
    if following.lstrip(_OPENERS)[:1].islower() or end in tuple(",;-—–，、；"):  # noqa: RUF001 (3)
        return True
    return len(line) >= _WRAPPED  # (4)


def _joint(line: str, following: str) -> str:
    if _wide(line[-1]) and _wide(following[0]):
        return ""
    wrapped_word = line[-1] == "-" and line[-2:-1].isalpha() and following[0].islower()
    return "" if wrapped_word else " "


def _wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def _cut_sentences(paragraph: str) -> list[str]:
    pieces: list[str] = []
    start = 0
    for end in _END.finditer(paragraph):
        if _ends_sentence(paragraph, start, end):
            pieces.append(paragraph[start : end.end()].strip())
            start = end.end()
    pieces.append(paragraph[start:].strip())
    return [piece for piece in pieces if piece]


def _ends_sentence(paragraph: str, start: int, end: re.Match[str]) -> bool:
    """Is this mark the end of the sentence that began at `start`?

    1. At the paragraph's end: yes.  2. Full-width marks: yes, unless quotes close and the sentence goes on
    without a space (the words of who said it).  3. Others only before a space, and not before a lower-case word.
    4. A lone full stop: not after a list number, an initial, an acronym or an abbreviation.
    """
    after = paragraph[end.end() : end.end() + 1]
    if not after:  # (1)
        return True
    mark = end.group().rstrip(_CLOSERS)
    if mark[-1] in _WIDE_ENDS:  # (2)
        return len(mark) == len(end.group()) or not after.isalpha()
    following = paragraph[end.end() + 1 : end.end() + 40].lstrip(_OPENERS)[:1]
    if after != " " or following.islower():  # (3)
        return False
    if mark != "." or len(mark) != len(end.group()):
        return True
    before = paragraph[start : end.start()]
    return not _abbreviated(before[before.rfind(" ") + 1 :].lstrip(_OPENERS), before.strip(), following)  # (4)


def _abbreviated(word: str, sentence: str, following: str) -> bool:
    """Does the full stop after `word` belong to the word? `following` is the next sentence's first character."""
    if word.isdecimal():
        return word == sentence and len(word) <= 3  # a list number
    if len(word) == 1 and word.isalpha() and word.isupper():
        return True  # an initial
    if "." in word and all(len(part) == 1 and part.isalpha() for part in word.split(".")):
        return word.lower() not in ("a.m", "p.m")  # U.S, e.g, z.B
    lower = word.lower()
    return lower in _TITLES or (lower in _BEFORE_NUMBER and following.isdigit())


def _with_neighbours(pieces: list[str]) -> list[str]:
    """Pieces with nothing to say join the piece before them, at the beginning the one after them."""
    joined: list[str] = []
    waiting = ""
    for piece in pieces:
        if not speakable(piece):
            if joined:
                joined[-1] += " " + piece
            else:
                waiting += piece + " "
        else:
            joined.append(waiting + piece)
            waiting = ""
    return joined


def _cut_long(sentence: str, limit: int) -> list[str]:
    parts: list[str] = []
    start = 0
    while len(sentence) - start > limit:
        end = _best_cut(sentence, start, limit)
        parts.append(sentence[start:end].strip())
        start = end + (sentence[end : end + 1] == " ")
    parts.append(sentence[start:].strip())
    return [part for part in parts if part]


def _best_cut(sentence: str, start: int, limit: int) -> int:
    """Where to end the part that begins at `start`: after `start`, at most `limit` characters on.

    A third of the limit is the least for a cut at a clause, so that a list of words is not spoken one by one.
    """
    window = sentence[start : start + limit + 1]
    clauses = [end.end() for end in _CLAUSE.finditer(window) if limit // 3 <= end.end() <= limit]
    if clauses:
        return start + max(clauses[-1], 1)
    space = window.rfind(" ", 1)
    if space > 0:
        return start + space
    cut = start + limit
    while cut > start + 1 and _inside_character(sentence, cut):
        cut -= 1
    return cut


def _inside_character(text: str, index: int) -> bool:
    """True if a cut before `index` would part a base character from its marks, or a joined emoji."""
    joiner = "\u200d"
    return (
        unicodedata.category(text[index])[0] == "M"
        or "\U0001f3fb" <= text[index] <= "\U0001f3ff"
        or joiner in (text[index], text[index - 1])
    )
