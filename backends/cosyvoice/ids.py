"""The token ids of CosyVoice3 and the limits that count tokens.

Speech ids live in a table of their own with 6761 rows: 6561 codes that become sound, and 200 rows that
never do, four of which have a meaning. Text ids are those of the Qwen2 tokenizer with CosyVoice3's extra tokens.
"""

from typing import Final

SPEECH_CODES: Final = 6561
"""Speech ids below this become sound; every id from here on ends the generation when it is sampled."""
SPEECH_ROWS: Final = 6761
SOS: Final = 6561
EOS: Final = 6562
TASK: Final = 6563
FILL: Final = 6564

TEXT_ROWS: Final = 151_936
"""Rows of the official text table; in a merged vocabulary, speech id s usually is TEXT_ROWS + s."""
END_OF_PROMPT: Final = "<|endofprompt|>"
END_OF_PROMPT_ID: Final = 151_646
"""The model was trained to find this text id before the text that it speaks; without it, it babbles."""

TOKENS_PER_SECOND: Final = 25

SILENT_CODES: Final = frozenset({1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323})
MAX_SILENT_RUN: Final = 5

MIN_TOKENS_PER_TEXT_TOKEN: Final = 2
MAX_TOKENS_PER_TEXT_TOKEN: Final = 20
