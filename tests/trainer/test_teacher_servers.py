"""A teacher on servers: what it is asked, whose numbers come back, and what ends a run on every rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from support.fakes import FakeStrategy
from support.http_server import JsonServer, Reply, ok

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError, RolloutError
from lightppo.experience.experience import Experience
from lightppo.models.actor import Actor
from lightppo.trainer.distillation import TeacherServers, score_top, teacher_pass

ONE_AT_A_TIME = threading.Lock()  # the servers share a model


class FakeTeacher(JsonServer):
    """vLLM's two routes in front of a model here."""

    def __init__(self, actor: Actor, tokenizer) -> None:
        super().__init__()
        self.actor, self.tokenizer, self.broken, self.most = actor, tokenizer, False, 20
        self.reply = self.answer

    def answer(self, path: str, body: dict, n: int) -> Reply:
        if self.broken:
            return 400, b"out of order"
        if path == "/tokenize":
            return ok(tokens=self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"])
        assert path == "/v1/completions"
        assert body["max_tokens"] == 1
        if body["prompt_logprobs"] > self.most:
            return 400, b"Requested prompt logprobs of 3, which is greater than max allowed"
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad(), ONE_AT_A_TIME:
            scores = self.actor.score_actions(ids, ids.size(1) - 1, logits=True)
        found = []
        for token, x, row in zip(body["prompt"][1:], scores.log_probs[0], scores.logits):
            best = row.log_softmax(0).topk(body["prompt_logprobs"])
            several = {token: x.item()} | dict(zip(best.indices.tolist(), best.values.tolist()))
            found.append({str(i): {"logprob": value} for i, value in several.items()})
        return ok(choices=[{"prompt_logprobs": [None, *found]}])


@pytest.fixture(scope="module")
def actor(tiny_model) -> Actor:
    return Actor(tiny_model).eval()


@pytest.fixture
def fakes(actor, tiny_tokenizer) -> Iterator[list[FakeTeacher]]:
    servers = [FakeTeacher(actor, tiny_tokenizer) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def build(fakes, tiny_tokenizer):
    def make(ranks=None, tokenizer=tiny_tokenizer, **options) -> TeacherServers:
        config = PPOConfig.from_flat(teacher_url=[server.url for server in fakes], **options)
        return TeacherServers(config, tokenizer, ranks or FakeStrategy())

    return make


# prompts of 3, 1 and 2 tokens on the left, responses of 2, 3 and 1 on the right
SEQUENCES = torch.tensor([[5, 6, 7, 8, 9, 0], [0, 0, 5, 9, 8, 7], [0, 6, 7, 5, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])


def test_the_numbers_are_the_models(build, fakes, actor):
    teacher = build()
    for server in fakes:
        server.requests.clear()
    got = teacher.score_actions(SEQUENCES, 3, MASK)
    with torch.no_grad():
        expected = actor.score_actions(SEQUENCES, 3, MASK)
    torch.testing.assert_close(got.log_probs, expected.log_probs)
    assert torch.equal(got.real, expected.real)
    asked = sorted(body["prompt"] for server in fakes for _, body in server.requests)
    assert asked == [[5, 6, 7, 8, 9], [5, 9, 8, 7], [6, 7, 5]]
    assert all(server.requests for server in fakes)  # they share the rows


def test_the_likeliest_tokens_are_the_models(build, actor):
    got, *top = build(distill_by="loss", distill_topk=3).score_top(SEQUENCES, 3, MASK, 3)
    with torch.no_grad():
        expected, *theirs = score_top(actor, SEQUENCES, 3, MASK, 3)
    torch.testing.assert_close(got.log_probs, expected.log_probs)
    torch.testing.assert_close(top[0], theirs[0])
    assert torch.equal(top[1], theirs[1])
    # largest first, of a row the first is its most likely token
    assert (top[0].diff(dim=-1) <= 0).all()
    assert top[0].shape == (3, 3, 3)
    assert not top[0][1, 0].eq(0).any()
    assert top[0][2, 1].eq(0).all()  # padding


def test_a_server_that_gives_fewer_tokens_ends_the_start(build, fakes):
    fakes[1].most = 2
    with pytest.raises(ConfigError, match=r"--teacher_url: .*greater than max allowed"):
        build(distill_by="loss", distill_topk=3)


def test_the_key_is_sent_and_not_shown(build, fakes, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "very-secret")
    build(teacher_api_key_env="TEACHER_KEY")
    assert all(
        sent["Authorization"] == "Bearer very-secret" for server in fakes for sent in server.headers
    )
    fakes[1].broken = True
    with pytest.raises(ConfigError, match="--teacher_url") as error:
        build(teacher_api_key_env="TEACHER_KEY")
    assert "very-secret" not in str(error.value)


def test_another_vocabulary_is_refused_at_the_start(build, fakes):
    class Other:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1, 2, 3]}

    fakes[1].tokenizer = Other()
    with pytest.raises(
        ConfigError,
        match=rf"--teacher_url: .*{fakes[1].url}.*\[1, 2, 3\].*vocabulary of --pretrain",
    ):
        build()


def test_many_ranks_share_what_the_servers_take(build, fakes):
    """At 512 ranks one request at a time, and ranks begin with different servers."""
    for rank in range(2):
        teacher, before = build(FakeStrategy(rank, 512)), [len(fake.requests) for fake in fakes]
        lock, now = threading.Lock(), []
        real = teacher._ask

        def ask(server, ids, lock=lock, now=now, real=real):
            assert lock.acquire(blocking=False)  # nobody else asks
            now.append(server)
            try:
                return real(server, ids)
            finally:
                lock.release()

        teacher._ask = ask
        teacher.score_actions(SEQUENCES, 3, MASK)
        asked = [len(fake.requests) - n for fake, n in zip(fakes, before)]
        assert asked == [[3, 0], [0, 3]][rank]


def test_they_share_out_all_samples_of_a_rank(build, fakes):
    """Whatever the size of micro batches."""
    config = PPOConfig.from_flat(teacher_url=[server.url for server in fakes])
    made = teacher_pass(config, build())
    assert made.takes_all
    experience = made.run(Experience(SEQUENCES, MASK, MASK[:, 3:].bool()))
    assert experience["teacher_log_probs"].shape == (3, 3)


def test_one_server_fails_and_the_other_answers_for_it(build, fakes):
    teacher = build()
    expected = teacher.score_actions(SEQUENCES, 3, MASK).log_probs
    fakes[0].broken = True
    assert torch.equal(teacher.score_actions(SEQUENCES, 3, MASK).log_probs, expected)


def test_none_is_left(build, fakes):
    teacher = build()
    for server in fakes:
        server.broken = True
    with pytest.raises(RolloutError, match=r"--teacher_url: rank 0: .*400.*out of order"):
        teacher.score_actions(SEQUENCES, 3, MASK)


def test_a_failure_on_another_rank_ends_this_one_too(build):
    class Ranks(FakeStrategy):
        def all_gather_object(self, obj):
            return [obj, "RefusedError: teacher is gone"]

    with pytest.raises(RolloutError, match=r"rank 1: .*teacher is gone"):
        build(Ranks()).score_actions(SEQUENCES, 3, MASK)


def test_an_answer_with_other_tokens_is_none(build, fakes):
    teacher = build()
    for server in fakes:
        server.reply = lambda path, body, n: ok(
            choices=[{"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}]
        )
    teacher.servers = [
        server for server in teacher.servers if setattr(server, "retries", 0) is None
    ]
    with pytest.raises(RolloutError, match="cannot be used"):
        teacher.score_actions(SEQUENCES, 3, MASK)
