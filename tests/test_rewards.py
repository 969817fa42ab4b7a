"""Loading, running and verifying rewards, with the real reasoning_gym."""

from __future__ import annotations

import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from moerl.rewards.answer_guard import is_safe
from moerl.rewards.load import load_reward
from moerl.rewards.reasoning_gym import extract_answer, reward
from moerl.rewards.score import RewardError, score

SOURCE = """
import json

def reward(prompt, response, record):
    return len(response) + record["bonus"]

def strict(prompt, response, record):
    return json.loads(response)["score"]

def lengths_batch(prompts, responses, records):
    return [{"score": len(r), "words": len(r.split())} for r in responses]

number = 3
"""


@pytest.fixture()
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture()
def package(tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "rewards.py").write_text(SOURCE)
    (tmp_path / "a_package" / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_package"
    for name in [name for name in sys.modules if name.startswith("a_package")]:
        del sys.modules[name]


def score_one(fn, response="r", on_error="stop"):
    return score(fn, ["p"], [response], [{}], on_error=on_error)


# load


def test_load_from_a_file(reward_file):
    assert load_reward(str(reward_file))("p", "four", {"bonus": 1}) == 5
    assert load_reward(f"{reward_file}:reward")("p", "four", {"bonus": 1}) == 5
    assert load_reward(f"{reward_file}:strict").__name__ == "strict"


def test_load_from_a_package(package):
    assert load_reward("a_package.rewards:reward")("p", "four", {"bonus": 1}) == 5
    assert load_reward("a_package.rewards.reward") is load_reward("a_package.rewards:reward")


def test_load_a_built_in():
    assert load_reward("reasoning_gym") is reward


@pytest.mark.parametrize(
    "spec, message",
    [
        ("nothing", "reward 'nothing' is neither a built-in (reasoning_gym) nor package.module:function"),
        ("a_package.missing:reward", "no module 'a_package.missing'"),
        ("no_package.rewards.reward", "no module 'no_package.rewards'"),
        ("a_package.rewards:missing", "no function 'missing' in a_package.rewards"),
        ("a_package.rewards.number", "no function 'number' in a_package.rewards"),
        ("a_package.broken:reward", "importing a_package.broken failed: ModuleNotFoundError: No module named 'not"),
        ("/nowhere/rewards.py", "no file /nowhere/rewards.py"),
        (":reward", "is neither a built-in"),
        (".relative:reward", "importing .relative failed: TypeError"),
    ],
)
def test_load_errors_are_one_line_that_names_the_missing_thing(package, spec, message):
    with pytest.raises(ValueError) as error:
        load_reward(spec)
    assert message in str(error.value) and spec in str(error.value) and "\n" not in str(error.value)


def test_load_errors_of_files(reward_file):
    with pytest.raises(ValueError, match=r"no function 'missing' in .*my_rewards.py"):
        load_reward(f"{reward_file}:missing")
    reward_file.write_text("def reward(:\n")
    with pytest.raises(ValueError, match=r"importing .*my_rewards.py failed: SyntaxError"):
        load_reward(str(reward_file))


# score


def test_score_of_numbers_and_dicts():
    def fn(prompt, response, record):
        score = len(prompt) * record["scale"]
        return {"score": score, "length": len(response), "text": "7", "nan": float("nan")} if prompt else score

    result = score(fn, ["ab", "", "c"], ["x", "y", "zz"], [{"scale": 2}] * 3, on_error="stop")
    assert result.scores == [4.0, 0.0, 2.0] and all(type(value) is float for value in result.scores)
    assert result.metrics == {"length": [1.0, 2.0]} and result.errors == []


@pytest.mark.parametrize("one", [1, 1.0, True, np.float32(1), np.bool_(True), torch.tensor(1.0), Decimal(1)])
def test_every_kind_of_number_is_one(one):
    assert score_one(lambda p, r, record: one).scores == [1.0]
    assert score_one(lambda p, r, record: {"score": one, "m": one}).metrics == {"m": [1.0]}


@pytest.mark.parametrize(
    "bad", [None, "1", [1.0], float("nan"), float("inf"), torch.ones(2), {"reward": 1}, {"score": None}, 1j]
)
def test_anything_else_is_an_error(bad):
    with pytest.raises(RewardError, match="sample 0: TypeError: the reward returned"):
        score_one(lambda p, r, record: bad)
    result = score_one(lambda p, r, record: bad, on_error="skip")
    assert result.scores == [None] and result.metrics == {} and "the reward returned" in result.errors[0]


def test_batch_functions_are_called_once(reward_file):
    fn = load_reward(f"{reward_file}:lengths_batch")
    result = score(fn, ["p"] * 3, ["a b", "", "c"], [{}] * 3, on_error="stop")
    assert result.scores == [3.0, 0.0, 1.0] and result.metrics == {"words": [2.0, 0.0, 1.0]}
    assert score(fn, [], [], [], on_error="stop").scores == []


def test_stop_names_the_sample_and_the_line(reward_file):
    fn = load_reward(f"{reward_file}:strict")
    responses = ['{"score": 1}', "not json " + "x" * 500 + " the end"]
    with pytest.raises(RewardError) as error:
        score(fn, ["first", "second"], responses, [{}, {}], on_error="stop")
    text = str(error.value)
    assert text.startswith("reward failed on sample 1: JSONDecodeError: Expecting value: line 1 column 1 (char 0)")
    assert 'my_rewards.py:8 in strict: return json.loads(response)["score"] -> ' in text  # and where in json it ended
    assert "prompt 'second'; response 'not json xxx" in text and text.endswith("xxx the end'")
    assert len(text) < 1000 and type(error.value.__cause__).__name__ == "JSONDecodeError"


def test_stop_stops_before_the_next_sample():
    seen = []

    def fn(prompt, response, record):
        seen.append(response)
        raise KeyError("boom")

    with pytest.raises(RewardError, match="sample 0: KeyError: 'boom'"):
        score(fn, ["p"] * 3, list("abc"), [{}] * 3, on_error="stop")
    assert seen == ["a"]


def test_skip_keeps_the_others_in_place(reward_file):
    fn = load_reward(f"{reward_file}:strict")
    result = score(fn, ["p"] * 3, ['{"score": 1}', "x", '{"score": 3}'], [{}] * 3, on_error="skip")
    assert result.scores == [1.0, None, 3.0]
    assert len(result.errors) == 1 and "sample 1: JSONDecodeError" in result.errors[0]


def test_errors_of_batch_functions():
    def raises_batch(prompts, responses, records):
        raise RuntimeError("no server")

    def one_bad_batch(prompts, responses, records):
        return [1, None]

    def short_batch(prompts, responses, records):
        return [1]

    two = (["p"] * 2, ["r"] * 2, [{}] * 2)
    result = score(raises_batch, *two, on_error="skip")
    assert result.scores == [None, None] and "sample 1: RuntimeError: no server" in result.errors[1]
    assert score(one_bad_batch, *two, on_error="skip").scores == [1.0, None]
    with pytest.raises(RewardError, match="sample 1: TypeError"):
        score(one_bad_batch, *two, on_error="stop")
    with pytest.raises(RewardError, match="short_batch returned 1 rewards for 2 samples"):
        score(short_batch, *two, on_error="skip")


def test_score_checks_its_own_arguments():
    with pytest.raises(ValueError, match="2 prompts, 1 responses and 1 records"):
        score(len, ["p", "q"], ["r"], [{}], on_error="stop")
    with pytest.raises(ValueError, match="on_error 'ignore' is unknown"):
        score_one(len, on_error="ignore")


# reasoning_gym


def entry_of(task: str, **config) -> dict:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=1, **config)[0]


def verify(task: str, answer: str, entry: dict | None = None) -> dict:
    return reward("", f"Thinking. <answer>{answer}</answer>", {"task": task, "entry": entry or entry_of(task)})


@pytest.mark.parametrize(
    "response, answer",
    [
        ("so <answer> 5\n</answer>.", "5"),
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        ("<answer>4</answer> no, <answer>5", "4"),
        ("<answer> or <answer>5</answer> tail</answer>", "5"),
        ("<answer></answer>", ""),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4"),
        ("5", None),
        ("</answer>5<answer>", None),
    ],
)
def test_the_last_pair_of_tags_is_the_answer(response, answer):
    assert extract_answer(response) == answer


def test_extraction_is_linear():
    assert extract_answer("<answer>" * 200_000 + "5</answer>" + "<" * 200_000) == "5"


def test_chain_sum():
    entry = entry_of("chain_sum", min_digits=3, max_digits=3)
    answer = entry["answer"]
    assert verify("chain_sum", answer, entry) == {"score": 1.0, "format": 1.0, "correct": 1.0}
    assert verify("chain_sum", f" {answer}.00 ", entry)["correct"] == 1.0  # its scorer compares decimals
    assert verify("chain_sum", str(int(answer) + 1), entry) == {"score": 0.0, "format": 1.0, "correct": 0.0}
    assert reward("", answer, {"task": "chain_sum", "entry": entry}) == {"score": 0.0, "format": 0.0, "correct": 0.0}
    wordy = verify("chain_sum", f"it is {answer}", entry)
    assert 0 < wordy["score"] < 1 and wordy["correct"] == 0.0  # partial credit is not correct


def test_countdown_accepts_any_right_expression():
    entry = entry_of("countdown")
    assert verify("countdown", entry["metadata"]["expression"], entry)["correct"] == 1.0
    assert verify("countdown", "1 + 1", entry)["score"] == 0.05


def test_an_answer_that_its_scorer_cannot_parse_is_wrong_and_no_error():
    entry = entry_of("prime_factorization")
    assert verify("prime_factorization", "two times three", entry) == {"score": 0.0, "format": 1.0, "correct": 0.0}
    assert verify("prime_factorization", entry["answer"], entry)["correct"] == 1.0
    assert verify("boxnet", "[[1]]")["score"] == 0.0


def test_a_bad_record_is_an_error():
    with pytest.raises(ValueError, match="this one has no 'task'"):
        reward("", "", {"entry": {}})
    with pytest.raises(ValueError, match="this one has no 'entry'"):
        reward("", "", {"task": "chain_sum"})
    with pytest.raises(ValueError, match="reasoning_gym task 'chain_some': .*not registered"):
        reward("", "", {"task": "chain_some", "entry": {}})
    with pytest.raises(ValueError, match="invalid literal"):  # the record's own answer cannot be read either
        verify("prime_factorization", "2 x 3", {"question": "?", "answer": "2 x 3", "metadata": {}})


def test_verifier_runs_under_score():
    entry = entry_of("chain_sum")
    responses = [f"<answer>{entry['answer']}</answer>", "no"]
    result = score(reward, ["", ""], responses, [{"task": "chain_sum", "entry": entry}] * 2, on_error="stop")
    assert result.scores == [1.0, 0.0]
    assert result.metrics == {"format": [1.0, 0.0], "correct": [1.0, 0.0]}


# guard

EVALUATING = (
    "binary_matrix n_queens spiral_matrix string_insertion countdown puzzle24 polynomial_multiplication "
    "simple_integration intermediate_integration"
).split()


@pytest.mark.parametrize("task", EVALUATING)
def test_an_answer_never_runs_as_code(task, tmp_path):
    """Unguarded, this answer creates the file in each of these tasks."""
    target = tmp_path / "written"
    for code in (f"open({str(target)!r}, 'w')", f"__import__('os').system('touch {target}')"):
        verify(task, code)
        verify(task, f"[{code}]")
        verify(task, f"x*sin(x, evaluate={code})")
        verify(task, f"sin({code!r})")  # sympy evaluates text arguments as well
    assert not target.exists()


@pytest.mark.parametrize("task", [*EVALUATING, "coin_flip"])
@pytest.mark.parametrize("huge", ["9**9**9**9", "((((9**60)**60)**60)**60)**60", "1e999999999", "factorial(10**9)", "99999999!"])
def test_an_answer_never_asks_for_a_number_too_big_to_hold(task, huge):
    """Unguarded, most of these do not return."""
    assert verify(task, huge)["correct"] == 0.0


@pytest.mark.parametrize("task", [*EVALUATING, "coin_flip"])
def test_the_guard_lets_right_answers_pass(task):
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(task, size=15, seed=3):
        answer = entry["metadata"]["expression"] if task == "countdown" else entry["answer"]
        if "Integral(" not in answer:  # where sympy found no closed form; to echo the question is no answer
            assert is_safe(task, answer), answer
        assert verify(task, answer, entry)["correct"] == 1.0


def test_the_guard_keeps_the_credit_for_lists_and_equivalent_forms():
    entry = entry_of("spiral_matrix")
    assert verify("spiral_matrix", str(entry["answer"].split()).replace("'", ""), entry)["score"] == 0.1
    entry = {"answer": "x**3/3 + sin(x)**2/2 + C", "metadata": {"variable": "x", "integrand": "x**2 + sin(x)*cos(x)"}}
    assert verify("simple_integration", "x**3*3**-1 - cos(x)**2/2 + 7", entry)["correct"] == 1.0
    assert verify("simple_integration", "Integral(x**2 + sin(x)*cos(x), x)", entry)["correct"] == 0.0
