import json
import logging
import wave
from pathlib import Path

import numpy as np
import pytest

from backends.cosyvoice.voice_encoder import VoiceFeatures
from backends.cosyvoice.voices import RATE, VoiceLibrary
from backends.errors import BackendUnavailable, InvalidInput, UnknownVoice

AUDIO = (np.sin(np.arange(RATE) / 9) / 2).astype(np.float32)
FEATURES = VoiceFeatures(
    np.arange(25, dtype=np.int32), np.full((80, 50), 0.5, np.float32), np.arange(192, dtype=np.float32)
)


def no_encoder(audio: np.ndarray, rate: int) -> VoiceFeatures:
    raise AssertionError("features that were stored are not made again")


def same(left: VoiceFeatures, right: VoiceFeatures) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in ("tokens", "mel", "embedding"))


def test_a_voice_is_there_again_after_a_restart(tmp_path: Path) -> None:
    added = VoiceLibrary(tmp_path).add("anna", "Anna Ä", "what she says", AUDIO, FEATURES, "models 1")
    again = VoiceLibrary(tmp_path)
    assert again.list() == [added]
    assert again.get("anna").transcript == "what she says"
    assert same(again.features("anna", "models 1", no_encoder), FEATURES)


def test_features_of_other_models_are_made_anew_from_the_recording(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    library.add("anna", "Anna", "", AUDIO, FEATURES, "models 1")
    heard = []

    def encode(audio: np.ndarray, rate: int) -> VoiceFeatures:
        heard.append((audio, rate))
        return VoiceFeatures(FEATURES.tokens[:5], FEATURES.mel[:, :10], FEATURES.embedding)

    assert len(library.features("anna", "models 2", encode).tokens) == 5
    assert len(library.features("anna", "models 2", no_encoder).tokens) == 5
    ((audio, rate),) = heard
    assert rate == RATE
    np.testing.assert_allclose(audio, AUDIO, atol=1e-4)


def test_truncated_features_are_made_anew(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    library.add("anna", "Anna", "", AUDIO, FEATURES, "models 1")
    path = tmp_path / "anna" / "features.npz"
    path.write_bytes(path.read_bytes()[:500])
    assert same(library.features("anna", "models 1", lambda audio, rate: FEATURES), FEATURES)


def test_a_folder_with_a_recording_that_someone_put_there_is_a_voice(tmp_path: Path) -> None:
    folder = tmp_path / "bea"
    folder.mkdir()
    (folder / "voice.json").write_text('{"name": "Bea"}')
    with wave.open(str(folder / "audio.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44100)
        file.writeframes(np.full((44100, 2), [1000, 3000], "<i2").tobytes())
    heard = []
    library = VoiceLibrary(tmp_path)
    library.features("bea", "models 1", lambda audio, rate: heard.append((audio, rate)) or FEATURES)
    ((audio, rate),) = heard
    assert rate == 44100
    np.testing.assert_allclose(audio, 2000 / 32768, rtol=1e-5)


def test_a_recording_that_is_no_wav_is_named(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    library.add("anna", "Anna", "", AUDIO, FEATURES, "models 1")
    (tmp_path / "anna" / "audio.wav").write_bytes(b"ID3 something")
    with pytest.raises(BackendUnavailable, match=r"audio.wav cannot be read"):
        library.features("anna", "models 2", no_encoder)


def test_a_deleted_voice_is_gone_from_the_disk(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    library.add("anna", "Anna", "", AUDIO, FEATURES, "models 1")
    library.delete("anna")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnknownVoice):
        library.get("anna")
    with pytest.raises(UnknownVoice):
        library.delete("anna")


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    library.add("anna", "Anna", "", AUDIO, FEATURES, "models 1")
    with pytest.raises(InvalidInput, match="already") as caught:
        library.add("anna", "Other", "", AUDIO, FEATURES, "models 1")
    assert caught.value.param == "name"
    assert [voice.name for voice in library.list()] == ["Anna"]


@pytest.mark.parametrize("voice_id", ["", ".", "..", "../x", "a/b", "a\\b", "a b", "ä", "x" * 65, "a\0", "a\n"])
def test_an_id_that_could_be_a_path_never_reaches_the_disk(tmp_path: Path, voice_id: str) -> None:
    library = VoiceLibrary(tmp_path / "library")
    with pytest.raises(InvalidInput) as caught:
        library.add(voice_id, "Name", "", AUDIO, FEATURES, "models 1")
    assert caught.value.param == "name"
    with pytest.raises(UnknownVoice):
        library.delete(voice_id)
    assert list(tmp_path.iterdir()) == []


def test_a_voice_that_cannot_be_written_is_not_half_there(tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    with pytest.raises(TypeError):
        library.add("anna", "Anna", "", None, FEATURES, "models 1")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert library.list() == []


def test_what_a_killed_run_left_is_cleared_and_what_is_no_voice_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".new-anna").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "voice.json").write_text("{")
    (tmp_path / "file.txt").write_text("")
    with caplog.at_level(logging.WARNING):
        assert VoiceLibrary(tmp_path).list() == []
    assert not (tmp_path / ".new-anna").exists()
    assert [record.args[0].name for record in caplog.records] == ["broken", "notes"]


def test_voices_are_listed_by_age(tmp_path: Path) -> None:
    for name, age in (("young", 300), ("old", 100), ("middle", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "voice.json").write_text(json.dumps({"name": name, "created_at": age}))
    assert [voice.id for voice in VoiceLibrary(tmp_path).list()] == ["old", "middle", "young"]
