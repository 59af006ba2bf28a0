"""Answers to multiple choice questions, and the option that a careful reader says is meant; None: none, or several.

The table was written by hand, before the code that reads answers. A new line is what a reader decides, never what the
code happens to give.
"""

# ruff: noqa: RUF001
import pytest

from stages.scoring.metrics.choices import choose

pytestmark = pytest.mark.promise(
    "An answer to a multiple choice question counts only where one option is meant, by 150 answers judged by hand."
)

GAS = {"A": "Oxygen", "B": "Carbon dioxide", "C": "Nitrogen"}
FRUIT = {"A": "Lemon", "B": "Apple", "C": "Orange"}
ANIMAL = {"A": "猫", "B": "狗", "C": "鸟"}
YES_NO = {"A": "Yes", "B": "No"}
NUMBER = {"A": "12", "B": "1.2", "C": "120", "D": "5"}
BOTH = {"A": "Cats", "B": "Dogs", "C": "Both A and B", "D": "None of the above"}
SHOWN = dict.fromkeys("ABCDE", "")  # the options are in the picture

TABLE = [
    # A letter alone.
    (GAS, "B", "B"),
    (GAS, "b", "B"),
    (GAS, "(b)", "B"),
    (GAS, "B)", "B"),
    (GAS, "[B]", "B"),
    (GAS, "B:", "B"),
    (GAS, "D", None),
    (GAS, "", None),
    # A letter with its text.
    (GAS, "B. Carbon dioxide", "B"),
    (GAS, "(B) carbon dioxide", "B"),
    (GAS, "b) carbon dioxide", "B"),
    (GAS, "B - Carbon dioxide", "B"),
    (GAS, "Carbon dioxide (B)", "B"),
    (GAS, "A. Oxygen, since B. Carbon dioxide is what they breathe out", "A"),
    # A letter in a sentence that says that it is the answer.
    (GAS, "Option B", "B"),
    (GAS, "option b", "B"),
    (GAS, "the answer is b", "B"),
    (GAS, "The answer is a gas", None),
    (GAS, "(b) is correct", "B"),
    (GAS, "A is right", "A"),
    (GAS, "I think it's B", "B"),
    (GAS, "My guess: C", "C"),
    (GAS, "So B.", "B"),
    (GAS, "Therefore, C.", "C"),
    (GAS, "Probably B", "B"),
    (GAS, "I'd go with A", "A"),
    (GAS, "I am going with A, as B and C are not what plants give out", "A"),
    (GAS, "B is the only one that fits", "B"),
    (GAS, "Oxygen and nitrogen are in the air already, so B", "B"),
    # A letter that names something else.
    (FRUIT, "It has vitamin C, so it is lemon", "A"),
    (FRUIT, "It has vitamin C, so the fruit is a lemon.", "A"),
    (
        FRUIT,
        "This fruit is rich in vitamin C and its skin is yellow and sour to the taste, as everybody knows who has "
        "bitten into one, so it must be a lemon.",
        "A",
    ),
    (FRUIT, "Lemon has vitamin C", "A"),
    (FRUIT, "It has vitamin C.", None),
    (FRUIT, "Vitamin C is in lemon and in apple", None),
    (FRUIT, "Vitamins A and C are in every orange", "C"),
    (FRUIT, "Plan B is to eat the orange", "C"),
    (FRUIT, "C, since a lemon is yellow", "C"),
    (FRUIT, "C because a lemon would be yellow", "C"),
    (GAS, "A plant", None),
    (GAS, "AB", None),
    (GAS, "B12", None),
    (GAS, "B-cells", None),
    (GAS, "25 °C", None),
    (GAS, "It boils at 100 C", None),
    (GAS, "Made in the U.S.A.", None),
    (GAS, "A C-shaped tube", None),
    # An option's text.
    (FRUIT, "LEMON!", "A"),
    (FRUIT, "a lemon", "A"),
    (FRUIT, "An apple", "B"),
    (FRUIT, "lemonade", None),
    (FRUIT, "I see a banana", None),
    (FRUIT, "The answer is orange, although a lemon is sour, too.", "C"),
    (FRUIT, "Orange, because an apple has another skin", "C"),
    # Several are named: none is meant.
    (GAS, "A or B", None),
    (GAS, "A/B", None),
    (GAS, "A, B", None),
    (GAS, "A & C", None),
    (GAS, "A B", None),
    (GAS, "both A and C", None),
    (GAS, "either B or C", None),
    (GAS, "(A) or (B)", None),
    (GAS, "A. or B.", None),
    (GAS, "A, or maybe B", None),
    (GAS, "A nor C", None),
    (GAS, "The answer is A or B", None),
    (GAS, "The answer is A and also C", None),
    (GAS, "Answer: B or C", None),
    (GAS, "Answer: A, C\nRationale: both are in the air", None),
    (GAS, "A. Oxygen or B. Carbon dioxide", None),
    (GAS, "A. Oxygen\nB. Carbon dioxide\nC. Nitrogen", None),
    (GAS, "A. Oxygen\nB. Carbon dioxide\nC. Nitrogen\nThe answer is B", "B"),
    (FRUIT, "Lemon or orange", None),
    (FRUIT, "Lemon, apple and orange", None),
    (FRUIT, "Either a lemon or an apple", None),
    (FRUIT, "The answer is lemon or orange", None),
    # What is denied is not meant.
    (GAS, "Neither A nor C", None),
    (GAS, "It is not A.", None),
    (GAS, "Definitely not C", None),
    (GAS, "The answer is not B", None),
    (GAS, "The wrong answer is A", None),
    (GAS, "A is incorrect.", None),
    (GAS, "A is wrong, B is right", "B"),
    (GAS, "Not A but B", "B"),
    (GAS, "The answer is not A but C", "C"),
    (GAS, "B, not A", "B"),
    (GAS, "B instead of A", "B"),
    (GAS, "B rather than C", "B"),
    (GAS, "It can't be A or C, so B", "B"),
    (GAS, "Option A is wrong, so the answer is C", "C"),
    (FRUIT, "not lemon", None),
    (FRUIT, "It isn't a lemon.", None),
    (FRUIT, "Neither lemon nor apple", None),
    (FRUIT, "Not a lemon but an orange", "C"),
    (FRUIT, "apple, not orange", "B"),
    (FRUIT, "an orange rather than a lemon", "C"),
    # The last word counts.
    (GAS, "The answer is A. No, I was wrong: the answer is C, since B is a solid", "C"),
    (GAS, "First I thought the answer is A, but the answer is B.", "B"),
    (GAS, "Is it A? No, it is B.", "B"),
    # Markdown and LaTeX.
    (GAS, "**B**", "B"),
    (GAS, "**B** Plants breathe it out, and A and C they do not.", "B"),
    (GAS, "**B**\n\nA plant gives it out; C does not change.", "B"),
    (GAS, "**B**\nOption A is taken in.", "B"),
    (GAS, "**B.** Carbon dioxide", "B"),
    (GAS, "**B. Carbon dioxide**\n\nA is taken in.", "B"),
    (GAS, "*B*", "B"),
    (GAS, "__B__", "B"),
    (GAS, "`B`", "B"),
    (GAS, "# B", "B"),
    (GAS, "- B", "B"),
    (GAS, "> B", "B"),
    (GAS, "### Answer\n\nB\n\nA is taken in.", "B"),
    (GAS, "**Final answer: (B)**", "B"),
    (GAS, "Of the three, **B** fits; A and C do not.", "B"),
    (GAS, "The gas is **carbon dioxide**, while oxygen is taken in.", "B"),
    (GAS, "$\\boxed{\\text{B}}$", "B"),
    (GAS, "A and C are taken in, thus \\boxed{B}.", "B"),
    (GAS, "<answer>B</answer>", "B"),
    (GAS, "~~A~~ B", "B"),
    (GAS, "**A** or **B**", None),
    # Full-width and Chinese forms.
    (GAS, "Ｂ", "B"),
    (GAS, "（Ｂ）", "B"),
    (ANIMAL, "B。", "B"),
    (ANIMAL, "（B）", "B"),
    (ANIMAL, "【B】", "B"),
    (ANIMAL, "「B」", "B"),
    (ANIMAL, "A、", "A"),
    (ANIMAL, "A、猫", "A"),
    (ANIMAL, "B．狗", "B"),
    (ANIMAL, "B：狗", "B"),
    (ANIMAL, "Ⓑ", "B"),
    (ANIMAL, "B，因为它在叫，A 和 C 都不会", "B"),
    (ANIMAL, "**B**。因为它在叫，A和C都不会", "B"),
    (ANIMAL, "答案：B", "B"),
    (ANIMAL, "答案是B。", "B"),
    (ANIMAL, "正确答案为（B）", "B"),
    (ANIMAL, "选B", "B"),
    (ANIMAL, "我选择B，因为A不会叫", "B"),
    (ANIMAL, "选项B", "B"),
    (ANIMAL, "故选：C。", "C"),
    (ANIMAL, "狗。", "B"),
    (ANIMAL, "这是一只狗。", "B"),
    (ANIMAL, "它含有维生素C，所以是猫", "A"),
    (ANIMAL, "维生素C", None),
    (ANIMAL, "不是猫", None),
    (ANIMAL, "不是猫，是狗", "B"),
    (ANIMAL, "不是A，是B", "B"),
    (ANIMAL, "A或B", None),
    (ANIMAL, "A和C", None),
    (ANIMAL, "A、B", None),
    (ANIMAL, "答案是A或B", None),
    (ANIMAL, "猫或狗", None),
    (ANIMAL, "答えはBです", "B"),
    (ANIMAL, "정답은 B입니다", "B"),
    # Options of few letters, of numbers, of other options, and in the picture.
    (YES_NO, "No.", "B"),
    (YES_NO, "Yes, there is no doubt.", "A"),
    (YES_NO, "No, it does not.", "B"),
    (YES_NO, "Yes and no", None),
    (NUMBER, "It is 12.", "A"),
    (NUMBER, "about 1.2 m", "B"),
    (NUMBER, "12 or 120", None),
    (NUMBER, "-5", None),
    (NUMBER, "5.25", None),
    (BOTH, "Both A and B", "C"),
    (BOTH, "The answer is both A and B.", "C"),
    (BOTH, "none of the above", "D"),
    (SHOWN, "The figure E fits", "E"),
    (SHOWN, "I think so", None),
    (SHOWN, "D or E", None),
]


def test_the_table_is_as_large_as_it_says():
    assert len(TABLE) >= 150 and sum(meant is None for *_, meant in TABLE) >= 40


@pytest.mark.parametrize(("options", "answer", "meant"), TABLE, ids=[answer[:40] or "empty" for _, answer, _ in TABLE])
def test_the_option_that_is_meant(options, answer, meant):
    assert choose(answer, options) == meant
