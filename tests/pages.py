"""The Markdown pages: which there are, and the code that they show."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
]
_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def code_blocks(page: str) -> list[tuple[str, str]]:
    """Each block of Python of a page, and what the block after it says it prints."""
    text = (ROOT / page).read_text()
    blocks = _BLOCK.findall(text)
    assert len(blocks) == len(re.findall(r"^ *(?:```|~~~) *py", text, re.MULTILINE)), (
        f"{page} has blocks of Python that are not tested: start them with ```python"
    )
    return blocks
