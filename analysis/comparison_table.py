"""Two sweeps side by side as a table for a text, such as a comment on a change. Markdown; no text of a record is mark-up."""

from __future__ import annotations

from analysis.changes import FIGURES, Comparison
from analysis.comparison_words import TITLES, cell_of, sentences, status_of
from analysis.formatting import MISSING, cell


def comparison_markdown(comparison: Comparison) -> str:
    """What changed in sentences, then a row for each setting that both sweeps have; changes beyond noise are bold."""
    shown = [name for name in FIGURES if any(name in pair.changes for pair in comparison.pairs)]
    lines = [["setting", *(TITLES[name] for name in shown), "what else changed"], ["---"] * (len(shown) + 2)]
    for pair in comparison.pairs:
        status = status_of(pair)
        row = [cell(pair.label + (f" ({status})" if status else ""))]
        for name in shown:
            if name not in pair.changes:
                row.append(MISSING)
                continue
            found = cell_of(name, pair)
            change = found.change if found.verdict == "same" else f"**{found.change}, {found.verdict}**"
            row.append(f"{found.before} → {found.after}: {change}" + (f" ({found.between})" if found.between else ""))
        lines.append([*row, cell("; ".join(f"{news.kind}: {news.sentence}" for news in pair.news)) or MISSING])
    said = [f"- {cell(sentence)}" for sentence in sentences(comparison)]
    return "\n".join([*said, "", *(f"| {' | '.join(row)} |" for row in lines)]) + "\n"
