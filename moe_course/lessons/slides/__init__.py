"""Instructor decks: Markdown in `slides/` becomes one HTML file and one PDF each.

    make slides                                            all decks: slides/build/NAME.html, slides/NAME.pdf
    python -m moe_course.lessons.slides slides/07_dispatch.md --no-pdf
    python -m moe_course.lessons.slides --record runs/trace slides/data/four_ranks.json

Show a deck: open the HTML file in a browser, from disk, without network. Space goes on, S opens the speaker's view with
notes and a clock, Esc shows all slides. The PDF is the deck on paper: there the live player is a still picture.

How a deck is written:

* At the top, between `---` lines, `notebook: 07_dispatch`: the lesson it belongs to. The heading of the first slide is
  the title of that notebook, word for word.
* Slides are parted by a line `---` with empty lines around it. Each begins with one heading, a sentence that says the
  point; `<!-- class: NAME -->` before the heading names its layout in `slides/style.css`.
* Each ends with `Note: 3 min.` and what to say.
* A number that was measured is written with the output it comes from: `[82](nb:00 "sent by rank 1: #")` means that
  the stored outputs of notebook 00 hold "sent by rank 1: " and a number, and that it is 82. `#` stands for a number,
  `…` for anything in the same line, a blank for any number of blanks. Without `#` the text must occur as it is. When a
  notebook changes, the build and a test say which slide is wrong.
* `<div class="player" data-run="four_ranks"></div>` plays the run in `slides/data/four_ranks.json`.

Only people who teach need this: the course itself never imports it.
"""
