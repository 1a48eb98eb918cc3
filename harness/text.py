"""Plain English of our own writing, for checks on real checkpoints: numbers, quotations, a list and a little code in it."""

__all__ = ["ENGLISH", "QUESTION"]

QUESTION = "Explain in three sentences why the sky is blue."

ENGLISH = """\
The lighthouse at Carrow Point was built in 1868, on a shelf of black rock that the tide covers twice a day. \
Its first keeper, a retired ship's carpenter named Ines Dahl, wrote down everything: the height of the waves, \
the price of oil, the birds that rested on the gallery rail in autumn. "A light is a promise," she told the \
boy who brought her bread, "and a promise is mostly counting." He did not understand her then, but he \
remembered it.

In the winter of 1881 the lamp failed for three nights. The clockwork that turned the lens had rusted, and the \
spare wheel lay in a warehouse forty miles away. Dahl turned the lens by hand, one revolution every thirty \
seconds, from four in the afternoon until nine the next morning. She sang to keep the time; when her voice \
gave out, the boy read numbers aloud from an almanac. No ship was lost. The inspector's report gave the matter \
one line, and misspelled her name.

What does it take to keep a lamp burning for a year? The old list is still nailed inside the door:
1. two hundred and ten gallons of oil, strained through linen;
2. ninety wicks, trimmed every four hours;
3. a chair that is not too comfortable;
4. somebody who will notice when the sound of the sea changes.

Today a small computer does the work. Its program is short enough to print on a postcard, and its main loop \
says little more than "while dark: turn(lens, degrees=12)". An engineer visits in May and in October, wipes \
salt from the panels, reads the log and goes home. Yet people in the village still look up at dusk, and count \
under their breath: twenty-eight, twenty-nine, thirty. If the beam comes a moment late, somebody picks up the \
telephone.

Machines drift, as people do. A bearing wears by a thousandth of an inch, a clock gains two seconds in a \
month, and a sum that was once exact is rounded a little differently after each repair. None of this is \
visible from the shore on any single night. It shows only to those who kept the earlier numbers, and who \
trouble to compare them line by line with the new ones. That was the lesson in Dahl's notebooks, which fill \
eleven boxes in the county archive: not that she was never wrong, but that she could always say when it began.
"""
