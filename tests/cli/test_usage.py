"""What is said when a command cannot be done as asked; and exit codes."""

from __future__ import annotations

import ast
import json
import os
import pickle
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import typer

import conewise
from conewise import model
from conewise.checks.verify import Verification
from conewise.cli.app import app
from conewise.cli.failing import as_option
from conewise.cli.schemas import COMMANDS
from conewise.errors import Argument, SweepError
from conewise.sweeps.storage.result_data import CellCheck
from conewise.text.prompts import Pair
from conewise.text.questions import Question
from tests.cli.captured_once import captured_once
from tests.cli.commands import (
    CLEAN,
    COMMAND,
    CORRUPTED,
    PAIR,
    Done,
    environment,
    refused,
    schema,
)
from tests.damage import LONG, count, drawn_from
from tests.doors import all_ours
from tests.text.written import write_pairs

TRACE = ("trace", "tiny", "--prompt", CLEAN, "--subject", "John", "--answer", " Mary", "--n", "1")
EVERY = (
    "sweep",
    "plan",
    "edges",
    "circuit",
    "sites",
    "verify",
    "report",
    "trace",
    "steer",
    "reproduce",
    "cone",
    "demo",
    "task",
    "schema",
)


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    """The commands of this module share the tiny model and what was captured of it: most only read it."""
    with captured_once():
        yield


# -- help ----------------------------------------------------------------------------------------


def test_help_lists_every_command_and_the_exit_codes() -> None:
    done = Done("--help")
    assert done.code == 0
    for name in EVERY:
        assert f"\n  {name} " in done.out
    for code in ("0", "1", "2", "70", "74", "130", "141"):
        assert f"\n{code:>7}  " in done.out


@pytest.mark.parametrize("name", EVERY)
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = Done(name, "--help")
    assert done.code == 0
    assert f"  conewise {name} " in done.out.partition("Examples:")[2]


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from conewise.cli.app import app; "
        "app(['sweep', '--help'], standalone_mode=False); "
        "print(sorted({'torch', 'pandas', 'transformers', 'plotly'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_help_is_plain_in_a_pipe_and_boxed_in_a_terminal() -> None:
    words = [*COMMAND, "sweep", "--help"]
    piped = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, env=environment(TERM="xterm-256color", COLUMNS="120"), stdout=theirs
    ) as shown:
        os.close(theirs)
        text = b""
        while chunk := _read(ours):
            text += chunk
        assert shown.wait() == 0
    assert "╭" not in piped
    assert "\x1b" not in piped
    assert "╭" in text.decode()
    for form in (piped, text.decode()):
        assert "z[layer=2:5" in form


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""


# -- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["sweep", "edges", "circuit"])
def test_a_model_without_prompts_of_its_own_has_to_be_given_some(command: str) -> None:
    said = refused(command, "smollm2-135m")
    assert "no prompts" in said
    assert f"conewise {command} smollm2-135m --clean" in said


@pytest.mark.parametrize("missing", ["--clean", "--corrupted", "--answer", "--wrong"])
def test_what_is_missing_of_a_pair_is_named(missing: str) -> None:
    words = list(PAIR)
    at = words.index(missing)
    assert f"{missing} is missing" in refused("plan", "tiny", *words[:at], *words[at + 2 :])


def test_a_metric_and_a_patch_ask_only_for_what_they_need() -> None:
    told = Done("plan", "tiny", "--json", "--clean", CLEAN, "--source", "zero", "--metric", "kl").json("plan")
    assert told["question"]["base"] == "clean"
    assert told["question"]["direction"] == "noise"
    assert told["question"]["source"] == "zero"
    told = Done("plan", "tiny", "--json", *PAIR[:6], "--metric", "prob").json("plan")
    assert told["question"]["direction"] == "denoise"


def test_a_pair_and_a_file_are_one_too_many(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.json", [Pair(CLEAN, CORRUPTED)])
    assert "--prompts and --clean both" in refused("sweep", "tiny", *PAIR, "--prompts", str(file))


def test_errors_of_a_file_name_file_row_and_field(tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    assert "pairs.json cannot be read" in refused("sweep", "tiny", "--prompts", str(file))
    file.write_text(json.dumps([{"clean": CLEAN, "corrupted": 3}]))
    assert "pairs.json, row 1, field 'corrupted'" in refused("sweep", "tiny", "--prompts", str(file))
    write_pairs(
        file, [Pair(CLEAN, CORRUPTED, ("Mary",), ("John",)), Pair(CLEAN, CORRUPTED, ("Zebra",), ("John",))]
    )
    said = refused("sweep", "tiny", "--prompts", str(file))
    assert "pairs.json, row 2, field 'answers': 'Zebra' is not in the vocabulary" in said
    write_pairs(file, [Pair(CLEAN, f"{CORRUPTED} a", ("Mary",), ("John",))])
    assert "clean has 15 tokens and corrupted 16" in refused("sweep", "tiny", "--prompts", str(file))
    write_pairs(file, [Pair(CLEAN, CORRUPTED, ("Mary",))])
    assert "row 1 has no wrong_answers" in refused("sweep", "tiny", "--prompts", str(file))
    write_pairs(file, [Pair(CLEAN, CLEAN, ("Mary",), ("John",))])
    assert "the same tokens in every pair" in refused("sweep", "tiny", "--prompts", str(file))


def test_prompts_of_several_lengths_are_one_sweep(tmp_path: Path) -> None:
    short = [text.partition(", ")[2] for text in (CLEAN, CORRUPTED)]
    pairs = [Pair(CLEAN, CORRUPTED, ("Mary",), ("John",)), Pair(short[0], short[1], ("Mary",), ("John",))]
    file = write_pairs(tmp_path / "pairs.csv", pairs)
    folder = tmp_path / "run"
    told = Done("sweep", "tiny", "--json", "--prompts", str(file), "--out", str(folder)).json("sweep")
    assert told["question"]["lengths"] == [6, 15]
    assert told["question"]["batches"] == 2
    assert told["measured"]["node_evaluations"] == told["plan"]["node_evaluations"]
    again = Done("sweep", "tiny", "--json", "--prompts", str(file), "--out", str(folder), "--resume").json(
        "sweep"
    )
    assert again["cells"] == told["cells"]
    assert "6 and 15 tokens" in refused("sweep", "tiny", "--prompts", str(file), "--pos", ":")
    split = Done("plan", "tiny", "--json", "--batch-size", "5").json("plan")
    assert split["question"]["batches"] == 4


# -- models, sites, memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./nowhere"], "there is no file or folder './nowhere'"),
        (["tiny", "--dtype", "float99"], "no dtype 'float99'"),
        (["tiny", "--device", "nowhere"], "cannot be moved to the device 'nowhere'"),
        (["tiny", "--device", "meta"], "cannot be moved to the device 'meta'"),
        (["a" * 5_000], "cannot load 'aaa"),
        (["tiny", "--revision", "main"], "has no revision 'main'. Leave --revision out."),
    ],
)
def test_a_model_that_cannot_be_loaded_is_said_to_be(words: list[str], said: str) -> None:
    assert said in refused("sites", *words)


def test_a_model_that_reads_no_text_or_two_is_refused_with_what_to_do(tmp_path: Path) -> None:
    library: Any = transformers
    library.GPT2LMHeadModel(
        library.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16)
    ).save_pretrained(tmp_path / "gpt2")
    assert "has no tokenizer" in refused("sweep", str(tmp_path / "gpt2"), *PAIR)
    assert Done("verify", str(tmp_path / "gpt2"), "--json").json("verify")["ok"] is True
    config = library.T5Config(
        num_layers=1, d_model=8, d_ff=8, d_kv=4, num_heads=2, vocab_size=20, decoder_start_token_id=0
    )
    library.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert "encoder-decoder" in refused("sites", str(tmp_path / "t5"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sites", "zz"], "'zz'"),
        (["--sites", "z[layer=2"], "cannot read the sites 'z[layer=2'"),
        (["--sites", "z[leyer=2]"], "cannot read 'leyer=2' in 'z[leyer=2]'"),
        (["--sites", "z[layer=99]"], "layer 99"),
        (["--sites", "result"], "cannot be swept"),
        (["--sites", "pattern"], "which never holds it. Load the model with --attention eager."),
        (["--sites", ""], "--sites names none"),
        (["--pos", "99"], "pos 99 is out of range"),
        (["--pos", "last"], "pos='last' is no choice"),
        (["--max-memory", "plenty"], "'plenty' is no amount of memory"),
        (["--max-memory", "10"], "The least that would do is --max-memory "),
    ],
)
def test_sites_and_memory_that_cannot_be_are_refused(words: list[str], said: str) -> None:
    assert said in refused("plan", "tiny", *words)


@pytest.mark.parametrize(
    ("sites", "count"), [("z", 16), ("z[layer=1:3, head=0]", 2), ("z[layer=0],mlp_out", 8), ("resid_pre", 4)]
)
def test_sites_are_every_layer_and_head_unless_a_part_is_named(sites: str, count: int) -> None:
    assert Done("plan", "tiny", "--json", "--sites", sites).json("plan")["plan"]["worlds"] == count


def test_the_parser_refuses_what_it_does_not_know() -> None:
    for words in (["sweep", "tiny", "--metric", "loss"], ["sweep"], ["swep"], ["plan", "tiny", "--top", "3"]):
        done = Done(*words)
        assert done.code == 2
        assert done.out == ""


# -- files ---------------------------------------------------------------------------------------


def test_files_that_cannot_be_written_are_found_out_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "inside")
    assert "cannot write into --out" in refused("sweep", "tiny", "--out", inside)
    assert "cannot write into --report" in refused("sweep", "tiny", "--report", f"{inside}/page.html")


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "tiny", "--report"),
        ("trace", "tiny", "--prompt", CLEAN, "--subject", "John", "--answer", " Mary", "--report"),
        ("cone", "tiny", "z[layer=0]", "-o"),
    ],
)
def test_a_file_that_is_none_is_refused_before_the_run_and_stays(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    page = tmp_path / "page.html"
    os.mkfifo(page)
    message = refused(*words, str(page))
    assert "page.html: it is a pipe, and only a regular file is replaced. Name another file." in message
    assert page.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "tiny", "--sites", "z[layer=0]", "--report"),
        ("circuit", "tiny", "--method", "exact", "--top", "3", "--report"),
        (
            "trace",
            "tiny",
            "--prompt",
            CLEAN,
            "--subject",
            "John",
            "--answer",
            " Mary",
            "--n",
            "1",
            "--report",
        ),
        ("cone", "tiny", "z[layer=0]", "-o"),
    ],
)
def test_a_page_replaces_a_page_of_ours_and_no_other_file(tmp_path: Path, words: tuple[str, ...]) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html>my thesis</html>")
    assert "it holds something else than a page of conewise. Name another file." in refused(*words, str(page))
    assert page.read_text() == "<html>my thesis</html>"
    page.write_text("")  # as a temporary file is made
    for _ in range(2):
        done = Done(*words, str(page), "--json")
        assert done.code == 0, done.err
        assert "page.html" in done.json(words[0]).__repr__()
        assert page.read_text().startswith("<!doctype html>")


def test_a_users_own_file_beside_the_report_stays(tmp_path: Path) -> None:
    own = tmp_path / ".conewise"
    own.write_text("mine")
    assert Done("sweep", "tiny", "--report", str(tmp_path / "page.html")).code == 0
    assert own.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".conewise", "page.html"]
    assert "--resume without --out" in refused("sweep", "tiny", "--resume")


def test_what_cannot_run_leaves_no_folder_that_is_taken(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    refused("sweep", "tiny", "--out", folder, "--max-memory", "10")
    assert Done("sweep", "tiny", "--out", folder).code == 0
    assert "holds a run already" in refused("sweep", "tiny", "--out", folder)


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    assert "there is no folder" in refused("report", str(tmp_path / "nowhere"))
    assert "no saved result" in refused("report", str(tmp_path))


def test_kinds_that_a_model_lacks_are_told_from_those_that_it_has() -> None:
    assert "no site of the kind 'zz'; there are" in refused("sites", "tiny", "--kind", "zz")
    said = "which never holds it. Load the model with --attention eager."
    assert said in refused("sites", "tiny", "--kind", "pattern")
    assert said in Done("sites", "tiny").out


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("z", "'z' is a kind of site, in layers 0 to 3; say which, for one 'z[layer=0]'"),
        ("z[layer=0:2]", "no single number"),
        ("z[layer=0],mlp_out[layer=1]", "is not one site"),
        ("nothing.here", "'nothing.here'"),
        ("z[layer=0, head=99]", "99"),
    ],
)
def test_a_cone_is_of_one_site(site: str, said: str) -> None:
    assert said in refused("cone", "tiny", site)


def test_a_cone_is_drawn_as_svg_or_html(tmp_path: Path) -> None:
    assert "drawn as .svg or as .html" in refused("cone", "tiny", "z[layer=0]", "-o", "cone.png")
    page = tmp_path / "cone.html"
    assert Done("cone", "tiny", "z[layer=0]", "-o", str(page)).code == 0
    assert "<html" in page.read_text(encoding="utf-8")


def test_a_trace_needs_its_subject_in_the_prompt() -> None:
    words = ("trace", "tiny", "--prompt", CLEAN, "--answer", "Mary")
    assert "'Paul' does not stand in the prompt" in refused(*words, "--subject", "Paul")
    assert "a standard deviation is above 0" in refused(*words, "--subject", "John", "--noise", "0")


# -- exit codes ----------------------------------------------------------------------------------


def test_a_check_that_fails_is_exit_code_1_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = CellCheck(2, 2, 0, 1.0, 0.5, 1e-4)
    monkeypatch.setattr("conewise.sweeps.result.recheck", lambda *_, **__: wrong)
    done = Done("sweep", "tiny", "--verify", "2", "--json")
    assert done.code == 1
    assert json.loads(done.out)["verification"]["ok"] is False
    assert "verification FAILED: 2 random cells" in done.err
    monkeypatch.setattr(model.Model, "verify", lambda *_, **__: Verification(3, 1, False, 0.5, None, 0.0))
    done = Done("verify", "tiny")
    assert done.code == 1
    assert "FAILED" in done.out


@pytest.mark.filterwarnings("default::conewise.errors.UnhookedWarning")
def test_what_the_module_does_not_show_is_a_note_and_no_failure() -> None:
    done = Done("sweep", "tiny", "--sites", "rot_q", "--verify", "2", "--json")
    assert done.code == 0
    found = json.loads(done.out)["verification"]
    assert (found["ok"], found["passed"], found["hooked"], found["interpreted"]) == (True, False, 0, 2)
    assert "note: 2 of 2 cells were compared with the captured program alone" in done.err
    assert "UnhookedWarning" not in done.err


def test_a_defect_is_exit_code_70_and_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Question, "plan", broken)
    done = Done("plan", "tiny")
    assert done.code == 70
    assert "error inside conewise: ZeroDivisionError: a defect" in done.err
    assert "Traceback" not in done.err
    assert "in broken" in Done("--debug", "plan", "tiny").err
    assert "Traceback" in Done("--debug", "sweep", "smollm2-135m").err


def test_a_reader_that_is_gone_is_exit_code_141_and_quiet() -> None:
    with subprocess.Popen(
        [*COMMAND, "schema", "sweep"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_messages_of_the_library_name_options() -> None:
    error = SweepError(
        "Resume it with ", Argument("max_memory", 300), " or more (", Argument("resume", True), "), give ",
        Argument("out"), " 'max_memory=1', leave ", Argument("precision", "tf32"), " out, or say ",
        Argument("dtype", "of mine"), " with ", Argument("connected", False), ".",
    )  # fmt: skip
    assert str(error) == (
        "Resume it with max_memory=300 or more (resume=True), give `out` 'max_memory=1', leave "
        "precision='tf32' out, or say dtype='of mine' with connected=False."
    )
    assert error.message(as_option) == (
        "Resume it with --max-memory 300 or more (--resume), give --out 'max_memory=1', leave --tf32 out, "
        "or say --dtype 'of mine' with --no-connected."
    )
    assert [argument.name for argument in error.arguments] == [
        "max_memory", "resume", "out", "precision", "dtype", "connected",
    ]  # fmt: skip
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_argument_that_a_message_names_is_an_option() -> None:
    """Read from the sources: a message that names an argument which no command has would mislead."""
    package = Path(conewise.__file__).parent
    named: dict[str, set[str]] = {"sweep": set(), "circuit": set(), "task": set()}
    for path in package.rglob("*.py"):
        # What circuits say reaches the command that finds them, and what tasks say the one that prints them.
        inside = path.relative_to(package).parts
        own = "task" if inside == ("text", "tasks.py") else "circuit" if inside[0] == "circuits" else "sweep"
        named[own] |= {
            ast.literal_eval(node.args[0])
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Argument"
        }
    assert {"max_memory", "resume", "out", "as_written"} <= named["sweep"]
    assert {"top", "threshold", "connected"} <= named["circuit"]
    commands: Any = typer.main.get_command(app)
    for command, own_names in named.items():
        options = {option for param in commands.commands[command].params for option in param.opts}
        assert {as_option(Argument(name)) for name in own_names} <= options


def test_an_option_is_declared_once_and_shared() -> None:
    """Commands that are not alike may use one word for things of their own: these are named here."""
    commands: Any = typer.main.get_command(app)
    told: dict[str, set[str]] = {}
    for one in commands.commands.values():
        for option in one.params:
            if option.param_type_name == "option":
                assert option.help, (one.name, option.name)
                told.setdefault(option.opts[0], set()).add(option.help)
    assert len(told) > 40
    assert {flag for flag, texts in told.items() if len(texts) > 1} == {
        "--kind",  # which sites are listed; the states that are traced
        "--n",  # how often noise is drawn; how many prompts; how many random inputs
        "--method",  # how effects are estimated; how a circuit is found
        "--out",  # the folder of a run, of a demo, of the reproduced experiments
        "--output",  # a drawing; a page
        "--prompt",  # the one that is traced; those that steered texts go on from
        "--source",  # what is put at a site; what removed edges carry
        "--split",  # how float32 is multiplied; which prompts of a task
        "--top",  # how many are shown; how many edges a circuit has
    }


# -- schemas -------------------------------------------------------------------------------------


def test_every_command_that_prints_json_has_a_schema() -> None:
    assert set(COMMANDS) == set(EVERY) - {"schema"}
    for name in COMMANDS:
        done = Done("schema", name)
        assert json.loads(done.out) == schema(name)
    assert "Did you mean sweep?" in refused("schema", "swep")


def test_schemas_are_strict() -> None:
    for name in COMMANDS:
        told = schema(name)
        assert told["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert told["additionalProperties"] is False


def test_tf32_is_refused_without_a_device_that_has_it() -> None:
    assert "TF32 is a way of multiplying float32 on a CUDA device" in refused("plan", "tiny", "--tf32")
    assert "Leave --tf32 out" in refused("plan", "tiny", "--tf32")
    assert "Leave --split out" in refused("plan", "tiny", "--split")
    assert "leave one of them out" in refused("plan", "tiny", "--split", "--tf32")


# -- what no command can take --------------------------------------------------------------------


def test_an_argument_that_is_not_utf8_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "sites", b"caf\xe9"], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: the argument 'caf\\udce9' is not UTF-8. Write it so; a file of another name can be renamed.\n"
    )


def test_a_command_that_has_too_little_memory_says_so() -> None:
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2); "
    script = limited + "from conewise.cli.app import app; app(['plan', 'tiny'], prog_name='conewise')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "error: there is not enough memory for " in done.stderr
    assert "--max-memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_without_end_and_paths_that_cannot_be_are_refused() -> None:
    digits, long = "9" * 5_000, "a" * 5_000
    assert "is no choice" in refused("plan", "tiny", "--pos", digits)
    assert "is no choice" in refused("plan", "tiny", "--sites", f"z[layer={digits}]")
    assert "is no single number" in refused("cone", "tiny", f"z[layer={digits}]")
    assert "there is no folder" in refused("report", long)
    assert "cannot write into --out" in refused("sweep", "tiny", "--out", long)
    words = ("trace", "tiny", "--prompt", CLEAN, "--subject", "John", "--answer", "Mary")
    assert "n is 1000000000; it is 1,000,000 or fewer" in refused(*words, "--n", "1000000000")
    assert Done(*words, "--window", "1000000000", "--n", "1").code == 0
    assert Done("verify", "tiny", "--seed", str(2**70)).code == 0


ODD = (
    *("", "0", "-1", "1", "3", "2:5", ":", "1e400", "nan", "inf", "-inf", "x", " ", "é", "1_000", "٣"),
    *(str(10**9), str(2**63), str(2**64), str(10**30), LONG, f"-{LONG}", "a" * 300, "a" * 5_000),
    *("\udcff", "\ud800", "/dev/null", "/dev/zero", "/", "~nobody/x", "[" * 3_000),
    *("z[", "]", "z[head=-1]", f"z[layer={LONG}]", f"z[layer=0:{LONG}]", "z,mlp_out", "resid_pre"),
)
FOUND = ("plan", "edges", "circuit", "sites", "cone", "verify", "trace", "sweep", "report", "schema")
USUAL = {
    "plan": ("tiny",),
    "edges": ("tiny", "--plan"),
    "circuit": ("tiny", "--plan"),
    "sweep": ("tiny", "--sites", "z[layer=0, head=0]"),
    "cone": ("tiny", "z[layer=1]"),
    "verify": ("tiny", "--n", "1"),
    "trace": TRACE[1:],
    "report": ("nowhere",),
    "schema": ("sweep",),
    "sites": ("tiny",),
}


def valued_options(command: str) -> list[str]:
    """The options of a command that take a value, but those that start workers; "" is its argument."""
    found: Any = typer.main.get_command(app)
    parameters = found.commands[command].params
    options = [one.opts[0] for one in parameters if one.param_type_name == "option" and not one.is_flag]
    return ["", *(one for one in options if one not in {"--ray", "--workers", "--help"})]


def test_odd_arguments_end_in_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some are names of files
    drawn = drawn_from("arguments")
    options = {command: valued_options(command) for command in FOUND}

    def words() -> list[str]:
        command = drawn.choice(FOUND)
        found = [command, *USUAL[command]]
        for _ in range(drawn.choice((1, 1, 1, 2))):
            option = drawn.choice(options[command])
            if option:
                found += [option, drawn.choice(ODD)]
            else:
                found[1] = drawn.choice(ODD)
        return found

    def attempt(given: list[str]) -> None:
        done = Done(*given)
        assert done.code in {0, 2}, done.err[-2_000:]
        assert "Traceback" not in done.err
        assert done.code == 0 or done.out == ""

    all_ours((words() for _ in range(count(20))), attempt)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("edges", "tiny", *PAIR, "--edges", "->"), "'->' names no component; write WRITER->READER"),
        (("sweep", "tiny", *PAIR, "--device", ""), "--device '' names no device, or one that is empty"),
        (
            ("sweep", "tiny", *PAIR, "--device", "cpu,"),
            "--device 'cpu,' names no device, or one that is empty",
        ),
        (("sweep", "tiny", *PAIR, "--method", "hybrid", "--out", "new"), "--method hybrid is not stored"),
        (("plan", "tiny", "--clean", ""), "--clean is an empty text"),
        (("plan", "tiny", *PAIR, "--answer", ""), "--answer is an empty text"),
        (("circuit", "tiny", *PAIR, "--wrong", ""), "--wrong is an empty text"),
        (
            ("plan", "tiny", *PAIR, "--noise-scale", "2"),
            "--noise-scale 2.0 is the standard deviation of noise, and --source run adds none",
        ),
        (
            ("edges", "tiny", *PAIR, "--source", "zero", "--noise-scale", "2"),
            "and --source zero adds none. Leave it out, or give --source noise",
        ),
    ],
)
def test_what_was_taken_for_something_else_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(*words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["sweep", "circuit"])
def test_a_folder_with_other_files_is_no_folder_for_a_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    said = refused(command, "tiny", *PAIR, "--out", str(tmp_path))
    assert "is a folder with other files in it, such as thesis.tex" in said
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert Done(command, "tiny", *PAIR, "--out", "").code == 2
