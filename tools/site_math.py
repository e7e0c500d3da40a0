"""MkDocs hook: formulas become MathML when the site is built, so that pages show them without script or network."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """The page with every formula of arithmatex written as MathML."""

    def formula(written: re.Match[str]) -> str:
        tag, kind, tex = written.groups()
        mathml = convert(html.unescape(tex), display="block" if kind == "[" else "inline")
        return f'<{tag} class="formula">{mathml}</{tag}>'

    return FORMULA.sub(formula, content)
