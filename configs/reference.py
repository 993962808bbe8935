"""The page docs/configuration.md, made from the schema: `python -m configs.reference > docs/configuration.md`."""

from configs.plain_yaml import flow
from configs.schema import FREE_ON_RESUME, KNOBS

HEAD = f"""# Every setting

Set them in a preset (`configs/*.yaml`) or on the command line as `key=value`. `python -m launch plan CONFIG` shows each
one's value and where it came from. On resume all but these need `--allow-changes`:
{", ".join(f"`{name}`" for name in FREE_ON_RESUME)}.

| setting | default | meaning |
|---|---|---|"""


def row(key: str) -> str:
    field = KNOBS[key].model_fields[key.rpartition(".")[2]]
    default = flow(field.get_default(call_default_factory=True))
    return f"| `{key}` | `{default}` | {(field.description or '').replace('|', 'or')} |"


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, *(row(key) for key in KNOBS)])


if __name__ == "__main__":
    print(page())
