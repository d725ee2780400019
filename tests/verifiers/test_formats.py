from collections.abc import Callable

import pytest
from support.fakes import FixedReward

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.registry import CombinedReward
from lightppo.rewards.reward_source import RewardOutput, RewardSource, score_rollouts
from lightppo.verifiers.formats import FORMATS, FormatReward, XmlFormatCheck

Make = Callable[..., Rollout]

RESPONSES = [  # response, think, think_answer
    ("<think>a</think><answer>b</answer>", True, True),
    ("\n<think>a\nb</think>\n <answer>c</answer>\n", True, True),
    ("a</think><answer>b</answer>", True, True),  # the template had the opening tag
    # empty: in form, but no answer follows the thoughts
    ("<think></think><answer></answer>", False, True),
    ("<think>1 < 2 & 3 > 2 <b></think><answer>&lt;</answer>", True, True),  # not XML, only its tags
    ("<think>a</think> b", True, False),
    ("<think>a</think>", False, False),  # no answer
    ("<think>a", False, False),  # cut off
    ("<think>a</think><answer>b", True, False),
    ("<think>a</think> so <answer>b</answer>", True, False),
    ("<think>a</think><answer>b</answer> bye", True, False),
    ("hi <think>a</think><answer>b</answer>", False, False),
    ("<answer>b</answer><think>a</think>", False, False),
    ("<answer>b</answer>", False, False),
    ("<think>a<answer>b</answer></think>", False, False),
    ("<think>a</think><think>b</think><answer>c</answer>", False, False),
    ("<think>a</think><answer>b</answer><answer>c</answer>", True, False),
    ("<think><think>a</think></think><answer>b</answer>", False, False),
    ("<THINK>a</THINK><answer>b</answer>", False, False),
    ("", False, False),
    ("b", False, False),
]


@pytest.mark.parametrize(("response", "think", "think_answer"), RESPONSES)
def test_forms(response: str, think: bool, think_answer: bool) -> None:
    assert FORMATS["think"](response) is think
    assert FORMATS["think_answer"](response) is think_answer


def test_format_as_a_source(make_rollout: Make) -> None:
    rollouts = [make_rollout(i, response or " ") for i, (response, _, _) in enumerate(RESPONSES)]
    source = FormatReward()
    assert isinstance(source, RewardSource)
    assert source.score(rollouts).scores == [float(row[2]) for row in RESPONSES]
    assert FormatReward("think").score(rollouts).scores == [float(row[1]) for row in RESPONSES]
    assert FormatReward(str.isupper, name="shouting").score(
        [make_rollout(0, "A"), make_rollout(1, "a")]
    ).scores == [
        1,
        0,
    ]
    assert source.score([]).scores == []
    with pytest.raises(ValueError, match=r"--reward_format .*xml"):
        FormatReward("xml")


GOOD, BAD = "<think>a</think><answer>b</answer>", "b"


def test_a_wrong_answer_in_form_costs_less(make_rollout: Make) -> None:
    responses = [GOOD, BAD, GOOD, BAD, GOOD, BAD]
    rollouts = [make_rollout(i, response) for i, response in enumerate(responses)]
    source = XmlFormatCheck(
        FixedReward(
            "fixed", RewardOutput([1.0, 1.0, 0.0, 0.0, 0.3, None], {"answered": [1.0] * 6})
        ),
        minimum=0.0,
    )
    score_rollouts(source, rollouts)
    # right answers, parts of one and unscored samples stay; 0 becomes -0.8 in form and -1 out of it
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0, -0.8, -1.0, 0.3, None]
    assert [rollout.extras["xml_format"] for rollout in rollouts] == [1.0, 0.0] * 3
    assert rollouts[0].extras["answered"] == 1.0
    assert source.minimum == -1.0
    assert source.name == "fixed"


def test_the_minimum_comes_from_the_source(make_rollout: Make) -> None:
    source = XmlFormatCheck(FormatReward("think_answer"))
    assert source.score([make_rollout(0, GOOD), make_rollout(1, BAD)]).scores == [1.0, -1.0]
    with pytest.raises(ValueError, match=r"--check_xml_format: .*--reward_minimum"):
        XmlFormatCheck(FixedReward("fixed", RewardOutput([])))
    with pytest.raises(RewardError, match=r"fixed .*xml_format"):
        XmlFormatCheck(
            FixedReward("fixed", RewardOutput([0.0], {"xml_format": [1.0]})), minimum=0
        ).score([make_rollout(0)])


def test_weighted_with_others(make_rollout: Make) -> None:
    both = CombinedReward(
        {FixedReward("fixed", RewardOutput([1.0, 0.0])): 1.0, FormatReward(): 0.1}
    )
    assert both.score([make_rollout(0, GOOD), make_rollout(1, GOOD)]).scores == pytest.approx(
        [1.1, 0.1]
    )
