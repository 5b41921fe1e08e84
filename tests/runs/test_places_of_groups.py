"""Where seeds of a group are mirrored: in its place, by the name that it has now, or in one that they were given."""

import json
import shutil

import pytest

from lockstep.commands.train import _config_of, main
from lockstep.launch import start
from lockstep.launch.request import request_of
from lockstep.launch.seeds import group as groups
from lockstep.launch.seeds import places as places_module
from lockstep.runs.directory import RunDirectory
from lockstep.runs.finding import seeds_in
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import remember_names, trusted_config

WORDS = ("CartPole-v1", "--num-envs", "8", "--num-shards", "4", "--nproc", "1")


@pytest.fixture
def mirror(tmp_path):
    return (tmp_path / "mirror").as_uri()


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Starts a group, or one run of it, by words, but for its training; says in which places its runs are now."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(groups.Group, "train", lambda self: 0)

    def begin(assignment, topology):
        RunDirectory(assignment.path).write_config(assignment.config)  # as a session does that begins
        return 0

    monkeypatch.setattr(start, "run_rank", begin)

    def ask(*words):
        assert start.start_run(request_of([*words, "--runs-dir", str(tmp_path), "--quiet"])) == 0

    return ask


def places(group):
    return [stored_config(seed).checkpoint.mirror for seed in seeds_in(group)]


@pytest.fixture
def many(asked, tmp_path, mirror):
    """A group of two seeds with a mirror."""
    asked(*WORDS, "--seeds", "5-6", "--name", "many", "--checkpoint.mirror", mirror)
    return tmp_path / "many"


def as_before(group):
    """Makes a group one of the versions that didn't write down its place."""
    kept = json.loads((group / "group.json").read_text())
    kept.pop("places", None)
    (group / "group.json").write_text(json.dumps(kept))


@pytest.fixture(params=["", "before"])
def copied(many, request):
    """A copy of it, made by this version or by one that didn't write down a group's place."""
    if request.param:
        as_before(many)
    return shutil.copytree(many, many.parent / "many2")


def test_what_can_not_be_read_of_another_seed_changes_nothing(asked, many, mirror):
    """Where the group's places are written down: a torn config, or one of a newer version."""
    copy = shutil.copytree(many, many.parent / "many2")
    (copy / "seed_6" / "config.json").write_text('{"seed": 6, "env')
    asked("--resume", "many2/seed_5")
    assert stored_config(copy / "seed_5").checkpoint.mirror == f"{mirror}/many2"


def test_a_place_that_can_not_be_written_down_is_said_with_what_would_work(asked, many, mirror, monkeypatch, capsys):
    as_before(many)
    copy = shutil.copytree(many, many.parent / "many2")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places_module, "keep_places", full)
    asked("--resume", "many2/seed_5")
    said = capsys.readouterr().err
    assert f"No space left on device); give the group's other seeds --checkpoint.mirror {mirror}/many2 when" in said
    asked("--resume", "many2/seed_6")
    assert places(copy) == [f"{mirror}/many2", f"{mirror}/many"]  # nobody can tell any more
    asked("--resume", "many2/seed_6", "--checkpoint.mirror", f"{mirror}/many2")
    assert places(copy) == [f"{mirror}/many2"] * 2


def test_a_seed_of_a_copied_group_is_mirrored_by_itself_as_one_of_the_copy(asked, copied, tmp_path, mirror, capsys):
    held = {name: (tmp_path / "many" / name).read_text() for name in ("group.json", "seed_5/config.json")}
    asked("--resume", "many2/seed_5")
    assert places(copied) == [f"{mirror}/many2", f"{mirror}/many"]
    assert sorted(each.name for each in (tmp_path / "mirror").iterdir()) == ["many2"]
    line = f"the run is copied to {mirror}/many2/seed_5 from here on; what is at {mirror}/many/seed_5 stays\n"
    assert capsys.readouterr().err.count(f"lockstep: checkpoint.mirror: {line}") == 1
    asked("--resume", "many2/seed_5")
    assert places(copied) == [f"{mirror}/many2", f"{mirror}/many"]
    assert "stays" not in capsys.readouterr().err
    assert trusted_config(copied / "seed_5")  # which is remembered as what this user has trained with
    assert {name: (tmp_path / "many" / name).read_text() for name in held} == held


@pytest.mark.parametrize("rest", ["many2", "many2/seed_6"])
def test_after_a_seed_of_a_copied_group_the_others_go_to_the_copys_place_too(asked, copied, mirror, rest):
    asked("--resume", "many2/seed_5")
    asked("--resume", rest)
    assert places(copied) == [f"{mirror}/many2"] * 2


def test_a_copied_group_as_a_whole_is_mirrored_as_the_copy_and_its_own_copies_as_theirs(asked, copied, mirror):
    asked("--resume", "many2")
    assert places(copied) == [f"{mirror}/many2"] * 2
    third = shutil.copytree(copied, copied.parent / "many3")
    asked("--resume", "many3/seed_6")
    assert places(third) == [f"{mirror}/many2", f"{mirror}/many3"]
    asked("--resume", "many3")
    assert places(third) == [f"{mirror}/many3"] * 2
    assert places(copied) == [f"{mirror}/many2"] * 2


def test_a_copy_of_a_copy_of_which_one_seed_went_on_by_itself(asked, copied, mirror):
    asked("--resume", "many2/seed_5")
    third = shutil.copytree(copied, copied.parent / "many3")
    asked("--resume", "many3")
    assert places(third) == [f"{mirror}/many3"] * 2


def test_a_copied_group_that_was_refused_leaves_its_originals_place_the_next_time(asked, copied, mirror, monkeypatch):
    def refuse(self):
        raise ValueError("no good")

    with monkeypatch.context() as patch:
        patch.setattr(groups.Group, "train", refuse)
        with pytest.raises(ValueError, match="no good"):
            asked("--resume", "many2")
    assert places(copied) == [f"{mirror}/many"] * 2
    asked("--resume", "many2")
    assert places(copied) == [f"{mirror}/many2"] * 2


@pytest.mark.parametrize("version", ["", "before"])
def test_the_original_and_its_seeds_go_on_at_their_places(asked, many, mirror, capsys, version):
    if version:
        as_before(many)
    for words in (["many/seed_5"], ["many"], ["many/seed_6"]):
        asked("--resume", *words)
        assert places(many) == [f"{mirror}/many"] * 2
    assert "checkpoint.mirror" not in capsys.readouterr().err


@pytest.fixture
def linked(asked, tmp_path, mirror):
    """A group that was begun by the name of a link to an empty directory."""
    (tmp_path / "disk" / "x17").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "x17")
    asked(*WORDS, "--seeds", "5-6", "--name", "link", "--checkpoint.mirror", mirror)
    return tmp_path / "link"


def test_a_group_by_a_links_name_is_mirrored_by_that(asked, linked, mirror, capsys):
    assert places(linked) == [f"{mirror}/link"] * 2
    for words in (["link/seed_5"], ["link"], [str(linked / "seed_6")]):
        asked("--resume", *words)
        assert places(linked) == [f"{mirror}/link"] * 2
    assert "checkpoint.mirror" not in capsys.readouterr().err
    asked("--resume", "disk/x17")  # by its own name it is another group, as one that was renamed
    assert places(linked) == [f"{mirror}/x17"] * 2


@pytest.mark.parametrize("version", ["", "before"])
def test_a_group_that_is_mirrored_by_its_own_name_stays_there_by_a_links(asked, many, mirror, capsys, version):
    if version:
        as_before(many)
    (many.parent / "link").symlink_to(many)
    for words in (["link/seed_5"], ["link"], ["link/seed_6"]):
        asked("--resume", *words)
        assert places(many) == [f"{mirror}/many"] * 2
    assert "checkpoint.mirror" not in capsys.readouterr().err


def test_a_link_to_a_seed_leads_to_its_group(asked, many, mirror):
    copy = shutil.copytree(many, many.parent / "many2")
    (many.parent / "seed_5").symlink_to(copy / "seed_5")
    asked("--resume", "seed_5")
    assert places(copy) == [f"{mirror}/many2", f"{mirror}/many"]


@pytest.mark.parametrize("given", ["own", "elsewhere/own"])
def test_a_place_that_a_seed_was_given_stays_in_a_copy_of_two(asked, many, mirror, given):
    """By the group's record: of two seeds with a place each nobody could tell which is the group's."""
    asked("--resume", "many/seed_6", "--checkpoint.mirror", f"{mirror}/{given}")
    copy = shutil.copytree(many, many.parent / "many2")
    for words in (["many2/seed_6"], ["many2/seed_5"], ["many2"]):
        asked("--resume", *words)
        assert places(copy)[1] == f"{mirror}/{given}"
    assert places(copy)[0] == f"{mirror}/many2"


def test_a_place_that_is_given_on_the_line_is_taken(asked, copied, mirror):
    asked("--resume", "many2/seed_5", "--checkpoint.mirror", f"{mirror}/given")
    assert places(copied) == [f"{mirror}/given", f"{mirror}/many"]
    asked("--resume", "many2/seed_6", "--checkpoint.mirror", f"{mirror}/many")
    assert places(copied) == [f"{mirror}/given", f"{mirror}/many"]


def test_a_seed_that_is_brought_into_a_copy_by_its_place_goes_on_there(asked, copied, mirror):
    asked("--resume", "many/seed_5")  # which copies it
    shutil.rmtree(copied / "seed_5")
    assert main(["--resume", f"{mirror}/many/seed_5", "--runs-dir", str(copied), "--quiet"]) == 0
    assert places(copied) == [f"{mirror}/many"] * 2


def test_a_seed_outside_a_group_keeps_its_place(asked, many, mirror):
    """As one has it that was brought from its mirror."""
    lone = shutil.copytree(many / "seed_5", many.parent / "elsewhere" / "seed_5")
    asked("--resume", str(lone))
    assert stored_config(lone).checkpoint.mirror == f"{mirror}/many"


@pytest.mark.parametrize("brought", [(5,), (5, 6)])
def test_a_group_of_which_seeds_alone_were_brought_from_its_mirror_says_how_each_goes_on(asked, many, mirror, brought):
    for seed in (5, 6):
        asked("--resume", f"many/seed_{seed}")  # which copies it
    shutil.rmtree(many)
    for seed in brought:
        assert main(["--resume", f"{mirror}/many/seed_{seed}", "--runs-dir", str(many), "--quiet"]) == 0
    words = (*WORDS, "--seeds", "5-6", "--name", "many", "--checkpoint.mirror", mirror, "--resume", "auto")
    with pytest.raises(ValueError, match=r"^name: run ") as refused:
        asked(*words)
    names, one = ("seed_5 … seed_6", "one of them") if brought[1:] else ("seed_5", "it")
    assert str(refused.value) == (
        f"name: run {many} exists already, with {names} but no config.json of a group; --resume {many / 'seed_5'} "
        f"continues {one} by itself, another --name starts a new group"
    )
    assert not (many / "config.json").exists()
    assert main(["--resume", str(many / "seed_5"), "--quiet"]) == 0  # as it says
    assert places(many)[0] == f"{mirror}/many"


def test_what_a_seed_would_go_on_with_is_shown_and_nothing_is_written(asked, copied, mirror):
    before = {path: path.read_text() for path in copied.rglob("*.json")}
    shown = _config_of(request_of(["--resume", str(copied / "seed_5")]))
    assert shown.checkpoint.mirror == f"{mirror}/many2"
    assert {path: path.read_text() for path in copied.rglob("*.json")} == before


def test_a_strangers_place_is_named_as_it_stands_there(asked, copied, mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    with pytest.raises(ValueError, match=rf"seed_5/config\.json names {mirror}/many, to which the run would be copied"):
        asked("--resume", "many2/seed_5")
    assert not (tmp_path / "mirror").exists()
    asked("--resume", "many2/seed_5", "--trust")
    assert places(copied)[0] == f"{mirror}/many2"


def test_the_config_of_a_strangers_group_sends_no_seed_elsewhere(asked, copied, mirror, tmp_path):
    file = copied / "config.json"
    file.write_text(file.read_text().replace(mirror, "file:///theirs"))
    asked("--resume", "many2/seed_5")
    assert places(copied)[0] == f"{mirror}/many"


def test_a_group_of_which_the_config_is_torn_leaves_a_seed_its_place(asked, copied, mirror):
    (copied / "config.json").write_text('{"env": {')
    asked("--resume", "many2/seed_5")
    assert places(copied)[0] == f"{mirror}/many"


def test_a_linked_group_is_the_one_that_it_is(asked, many, mirror):
    (many.parent / "link").symlink_to(many)
    asked("--resume", "link/seed_5")
    assert places(many) == [f"{mirror}/many"] * 2


def test_a_seed_that_is_linked_into_a_copy_is_the_originals(asked, copied, many, mirror):
    shutil.rmtree(copied / "seed_5")
    (copied / "seed_5").symlink_to(many / "seed_5")
    asked("--resume", "many2/seed_5")
    assert places(many) == [f"{mirror}/many"] * 2


def test_a_group_that_gets_a_mirror_later_is_known_by_it(asked, tmp_path, mirror):
    asked(*WORDS, "--seeds", "5-6", "--name", "many")
    asked("--resume", "many", "--checkpoint.mirror", mirror)
    remember_names(stored_config(tmp_path / "many" / "seed_5"))
    copy = shutil.copytree(tmp_path / "many", tmp_path / "many2")
    asked("--resume", "many2/seed_6")
    asked("--resume", "many2/seed_5")
    assert places(copy) == [f"{mirror}/many2"] * 2
