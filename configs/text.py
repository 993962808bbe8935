"""Text that others wrote, made safe to show."""


def printable(text: str) -> str:
    """`text` on one line, without characters that steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
