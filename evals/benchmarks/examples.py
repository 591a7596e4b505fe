"""Five worked questions of our own, in the form of MMLU-Pro's, for where its validation split is not at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OWN_EXAMPLES: Sequence[Mapping[str, Any]] = (
    {
        "question": "What is the worst-case number of comparisons of binary search in a sorted array of 1000 elements?",
        "options": ["5", "9", "10", "31", "100", "500", "999", "1000"],
        "answer": "C",
        "cot_content": "Let's think step by step. A comparison leaves at most half of the elements. After k of them at "
        "most 1000 / 2^k are left, and 2^10 = 1024 is the first power of two above 1000, so 10 comparisons are enough "
        "and 9 are not. The answer is (C).",
    },
    {
        "question": "A byte holds the two's complement number 11110110. Which decimal number is it?",
        "options": ["-118", "-10", "-9", "-6", "10", "118", "246", "-246", "9", "6"],
        "answer": "B",
        "cot_content": "Let's think step by step. The first bit is 1, so the number is negative. Inverting gives "
        "00001001 = 9, and adding 1 gives 10, so it is -10. The answer is (B).",
    },
    {
        "question": "Which page does LRU replace next, with three frames, after the references 1, 2, 3, 1, 4, 1?",
        "options": ["1", "2", "3", "4", "None, a frame is free"],
        "answer": "C",
        "cot_content": "Let's think step by step. After 1, 2, 3 the frames are full. The reference to 1 makes 2 the "
        "least recently used, so 4 replaces 2. The frames now hold 1, 3, 4. The last reference is to 1, so the order "
        "of last use is 3, 4, 1, and 3 goes next. The answer is (C).",
    },
    {
        "question": "How many distinct simple undirected graphs are there on 4 labelled vertices?",
        "options": ["6", "11", "12", "16", "24", "32", "64", "128", "256", "4096"],
        "answer": "G",
        "cot_content": "Let's think step by step. Four vertices have 4 * 3 / 2 = 6 pairs. Each pair is joined or not, "
        "independently, which makes 2^6 = 64 graphs. The answer is (G).",
    },
    {
        "question": "A cache access takes 2 ns, memory another 100 ns after a miss, and 95 % of accesses hit. What is "
        "the mean access time?",
        "options": ["2 ns", "5 ns", "6.9 ns", "7 ns", "7.1 ns", "51 ns", "97 ns", "102 ns"],
        "answer": "D",
        "cot_content": "Let's think step by step. Every access costs 2 ns for the cache. 5 % of them cost another "
        "100 ns, which adds 0.05 * 100 = 5 ns. Together 2 + 5 = 7 ns. The answer is (D).",
    },
)
