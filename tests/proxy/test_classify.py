import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.classify import ALL_MODELS, COMFYUI_MODEL, Classifier, Plan, Source, has_dots, normalise, source
from proxy.config import Config
from proxy.errors import BadRequest, NotFound
from proxy.line import Mode

CONFIG = Config.model_validate(
    {
        "upstreams": {"swap": {"url": "http://swap"}, "vllm": {"url": "http://vllm"}},
        "backends": {"voice": {"kind": "hibari"}},
        "groups": {
            "chat": {"mode": "read", "models": ["qwen", "org/llama", "org", "qwen/v1"], "upstream": "swap"},
            "vision": {"mode": "read", "models": ["llava*", "*-vl"], "upstream": "vllm"},
            "embeddings": {"mode": "none", "models": ["bge"], "endpoints": ["/v1/embeddings"], "upstream": "swap"},
            "speech": {"mode": "write", "models": ["hibari"], "backend": "voice"},
            "library": {"mode": "write", "models": ["chatterbox", "*-tts"], "upstream": "swap"},
        },
        "aliases": {"gpt-4o": "qwen", "tts-1": "hibari"},
    }
)
OPEN = CONFIG.model_copy(update={"default_group": "chat"})


def plan(method: str, path: str, model: str | None = None, config: Config = CONFIG) -> Plan:
    return Classifier(config).plan(method, normalise(path), model)


# Where a request names its model: llama-swap's table


POSTS = [
    "/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/infill", "/completion",
    "/v1/audio/speech", "/v1/audio/voices", "/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img",
    "/audioapi/v1/tasks/run", "/v/chat/completions", "/v/responses", "/v/completions", "/v/messages",
    "/v/messages/count_tokens", "/v/embeddings", "/v/rerank", "/v/reranking", "/v1/audio/transcriptions",
    "/v1/images/edits",
]  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
def test_these_posts_name_the_model_in_their_body(path: str) -> None:
    assert source("POST", path) is Source.BODY
    assert plan("POST", path, "qwen").mode is Mode.READ


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/sdapi/v1/loras", "/props"])
def test_these_gets_name_the_model_in_their_query(path: str) -> None:
    assert source("GET", path) is Source.QUERY
    assert plan("GET", path, "qwen").model == "qwen"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/upstream/qwen", "/upstream/qwen/infill", "/upstream/qwen/ui/"])
def test_any_method_names_the_model_in_an_upstream_path(method: str, path: str) -> None:
    assert source(method, normalise(path)) is Source.PATH
    assert (plan(method, path).model, plan(method, path).mode) == ("qwen", Mode.READ)


@pytest.mark.parametrize("path", ["/comfyui", "/comfyui/prompt", "/comfyui/ws"])
def test_comfyui_has_a_model_of_its_own(path: str) -> None:
    assert source("POST", path) is Source.FIXED
    assert plan("POST", path, config=OPEN).model == COMFYUI_MODEL


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/models", "/health", "/", "/ui", "/ui/index.html", "/logs", "/logs/stream", "/metrics", "/running",
     "/api/events", "/api/version", "/favicon.ico", "/upstream", "/v1/files", "/comfyuinot"],
)  # fmt: skip
def test_these_paths_load_no_model_and_take_no_lease(path: str) -> None:
    assert source("GET", path) is Source.NOWHERE
    found = plan("GET", path)
    assert (found.mode, found.model, found.upstream) == (None, "", "swap")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", [*POSTS, "/props", "/upstream/qwen/x", "/comfyui/x", "/unload"])
def test_head_and_options_never_take_a_lease(method: str, path: str) -> None:
    assert plan(method, path).mode is None


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech", "/api/models/unload"])
def test_another_method_on_a_posts_path_takes_no_lease(method: str, path: str) -> None:
    assert plan(method, path).mode is None


# Unloading


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/models/unload"), ("GET", "/unload"), ("GET", "//unload/")])
def test_unloading_everything_takes_the_write_lease(method: str, path: str) -> None:
    found = plan(method, path)
    assert (found.model, found.mode, found.upstream) == (ALL_MODELS, Mode.WRITE, "swap")


@pytest.mark.parametrize(
    ("path", "model", "upstream"),
    [
        ("/api/models/unload/qwen", "qwen", "swap"),
        ("/api/models/unload/org/llama", "org/llama", "swap"),
        ("/api/models/unload/org%2Fllama/", "org/llama", "swap"),
        ("/api/models/unload/llava-7b", "llava-7b", "vllm"),
        ("/api/models/unload/gpt-4o", "qwen", "swap"),
        ("/api/models/unload/bge", "bge", "swap"),
        ("/api/models/unload/unheard-of", "unheard-of", "swap"),
    ],
)
def test_unloading_a_model_takes_the_write_lease_where_it_lives(path: str, model: str, upstream: str) -> None:
    found = plan("POST", path)
    assert (found.model, found.mode, found.upstream) == (model, Mode.WRITE, upstream)


def test_a_model_of_this_process_is_not_unloaded_at_an_upstream() -> None:
    with pytest.raises(NotFound, match="hibari"):
        plan("POST", "/api/models/unload/hibari")


# From the model to the group


@pytest.mark.parametrize(
    ("model", "group", "mode"),
    [
        ("qwen", "chat", Mode.READ),
        ("llava-7b", "vision", Mode.READ),
        ("org/x-vl", "vision", Mode.READ),
        ("bge", "embeddings", Mode.NONE),
        ("hibari", "speech", Mode.WRITE),
        ("chatterbox", "library", Mode.WRITE),
        ("f5-tts", "library", Mode.WRITE),
    ],
)
def test_the_group_is_the_one_that_names_the_model_or_whose_pattern_matches(model: str, group: str, mode: Mode) -> None:
    found = plan("POST", "/v1/chat/completions", model)
    assert (found.model, found.group, found.mode) == (model, group, mode)


def test_a_name_goes_before_a_pattern_and_the_first_pattern_before_later_ones() -> None:
    groups = {
        "all": {"mode": "read", "models": ["*"], "upstream": "swap"},
        "q": {"mode": "read", "models": ["qwen*"], "upstream": "swap"},
        "one": {"mode": "write", "models": ["qwen"], "upstream": "swap"},
    }
    config = Config.model_validate({"upstreams": {"swap": {"url": "http://swap"}}, "groups": groups})
    assert plan("POST", "/v1/completions", "qwen", config).group == "one"
    assert plan("POST", "/v1/completions", "qwen3", config).group == "all"


def test_a_pattern_is_about_letters_as_they_are() -> None:
    with pytest.raises(NotFound):
        plan("POST", "/v1/chat/completions", "LLAVA-7B")


def test_a_model_that_no_group_names_goes_where_its_endpoint_says_then_to_the_default_group() -> None:
    assert plan("POST", "/v1/embeddings", "e5").group == "embeddings"
    assert plan("POST", "/v1/embeddings", "qwen").group == "chat"
    assert plan("POST", "/v1/chat/completions", "e5", OPEN).group == "chat"
    assert plan("POST", "/v1/embeddings", "e5", OPEN).group == "embeddings"


def test_without_a_default_group_an_unknown_model_is_404() -> None:
    with pytest.raises(NotFound) as caught:
        plan("POST", "/v1/chat/completions", "e5")
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


@pytest.mark.parametrize("model", [None, ""])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/props")])
def test_without_a_model_the_answer_is_400(method: str, path: str, model: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        plan(method, path, model)
    assert (caught.value.status, caught.value.param) == (400, "model")


@pytest.mark.parametrize("model", ["a\nb", "a\x00", "a\ud800", "a\x1b[31m", "a\u2028"])
def test_a_model_that_cannot_be_printed_is_400(model: str) -> None:
    with pytest.raises(BadRequest) as caught:
        plan("POST", "/v1/chat/completions", model, OPEN)
    assert caught.value.param == "model"


def test_a_model_is_not_named_at_any_length() -> None:
    assert plan("POST", "/v1/chat/completions", "m" * 512, OPEN).model == "m" * 512
    with pytest.raises(BadRequest, match="the field 'model' is over 512 characters") as caught:
        plan("POST", "/v1/chat/completions", "m" * 513, OPEN)
    assert caught.value.param == "model"
    with pytest.raises(BadRequest, match="the model in the path is over 512 characters"):
        plan("POST", f"/upstream/{'m' * 513}/x", config=OPEN)


@pytest.mark.parametrize("path", ["/upstream/a%0Ab/x", "/api/models/unload/a%0Ab"])
def test_a_path_whose_model_cannot_be_printed_is_400(path: str) -> None:
    with pytest.raises(BadRequest):
        plan("POST", path, config=OPEN)


def test_an_alias_is_replaced_by_its_model() -> None:
    assert plan("POST", "/v1/chat/completions", "gpt-4o").model == "qwen"
    found = plan("POST", "/v1/audio/speech", "tts-1")
    assert (found.model, found.backend, found.upstream) == ("hibari", "voice", None)
    assert found.why == "'tts-1' is alias of 'hibari', which is named by group 'speech'"


def test_an_upstreams_own_alias_goes_where_its_model_does() -> None:
    ids = {"also-qwen": "qwen"}
    found = Classifier(CONFIG).plan("POST", "/v1/completions", "also-qwen", known=lambda name: ids.get(name, name))
    assert found.group == "chat"


# Ids in paths


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/upstream/org/llama/v1/chat/completions", "org/llama"),
        ("/upstream/org%2Fllama/v1/chat/completions", "org/llama"),
        ("/upstream/org/other/v1", "org"),
        ("/upstream/qwen/v1/chat/completions", "qwen/v1"),
        ("/upstream/qwen/v2", "qwen"),
        ("/upstream/llava-7b/v1/chat/completions", "llava-7b"),
        ("/upstream/a/b-vl/c-vl/v1", "a/b-vl"),
        ("/upstream/unheard/of/v1", "unheard"),
        ("//upstream//qwen//x//", "qwen"),
        ("/upstream/qw%65n/x", "qwen"),
    ],
)
def test_in_a_path_the_longest_named_id_counts_then_the_shortest_pattern_then_the_first_part(
    path: str, model: str
) -> None:
    assert plan("GET", path, config=OPEN).model == model


def test_an_alias_in_a_path_stays_as_it_is() -> None:
    assert plan("GET", "/upstream/gpt-4o/x", config=OPEN).model == "gpt-4o"


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("", "/"),
        ("/", "/"),
        ("//", "/"),
        ("/v1/models/", "/v1/models"),
        ("//v1///models//", "/v1/models"),
        ("/upstream/a%2F%2Fb/", "/upstream/a%2F%2Fb"),
        ("/upstream/a%20b%zz%", "/upstream/a%20b%zz%"),
        ("/v1/ch%61t/%63ompletions", "/v1/chat/completions"),
        ("/a/%2e%2E/b", "/a/../b"),
    ],
)
def test_a_path_is_compared_without_slashes_and_percent_signs_that_mean_nothing(raw: str, path: str) -> None:
    assert normalise(raw) == path
    assert normalise(path) == path


def test_no_spelling_of_a_path_gets_past_the_lease() -> None:
    for path in (
        "//v1/ch%61t/%63omple%74ions/",
        "/v1%2Fchat%2fcompletions",
        "%2Fv1/chat/completions%2F",
    ):
        assert plan("POST", path, "qwen").mode is Mode.READ
    assert plan("GET", "/unloa%64").mode is Mode.WRITE
    assert plan("GET", "/v1%2Fmodels").mode is None


@pytest.mark.parametrize(
    ("path", "dots"),
    [("/a/../b", True), ("/./b", True), ("/a/..", True), ("/a/.../b..c/.d", False), ("/a/%2e/b", True), ("/", False)],
)
def test_a_path_with_dot_segments_is_known(path: str, dots: bool) -> None:
    assert has_dots(normalise(path)) is dots


# The default place


def test_what_names_no_model_goes_to_the_default_groups_upstream_or_the_first() -> None:
    assert plan("GET", "/ui").upstream == "swap"
    moved = CONFIG.model_copy(update={"default_group": "vision"})
    assert plan("GET", "/ui", config=moved).upstream == "vllm"
    local = CONFIG.model_copy(update={"default_group": "speech"})
    assert plan("GET", "/ui", config=local).upstream == "swap"


@pytest.mark.parametrize(("method", "path"), [("GET", "/ui"), ("GET", "/unload"), ("POST", "/api/models/unload/m")])
def test_without_upstreams_it_is_404(method: str, path: str) -> None:
    with pytest.raises(NotFound):
        plan(method, path, config=Config())


def test_the_models_that_are_named_exactly_are_listed() -> None:
    assert [model for model, _, _ in Classifier(CONFIG).models()] == [
        "qwen", "org/llama", "org", "qwen/v1", "bge", "hibari", "chatterbox"
    ]  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["GET", "POST", "HEAD", "DELETE"]),
    st.sampled_from(["/upstream/", "/api/models/unload/", "/comfyui/", "/v1/", "/"]),
    st.text(alphabet=st.sampled_from("/%2Faqwen-.*[]?"), max_size=20),
    st.none() | st.text(max_size=6),
)
def test_every_request_has_a_plan_or_a_4xx(method: str, prefix: str, rest: str, model: str | None) -> None:
    answer: Plan | BadRequest
    try:
        answer = plan(method, prefix + rest, model, OPEN)
    except BadRequest as error:
        answer = error
    assert answer.upstream or answer.backend if isinstance(answer, Plan) else answer.status in (400, 404)
