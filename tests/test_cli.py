"""The command line, in this process where possible."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.cli import main
from kvflow.router.admin import AdminKey
from kvflow.tenants import Keys
from tests.test_config import CLUSTERS, write


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "KVFLOW_CONFIG_PATH",
        "KVFLOW_POLICY_MODULES",
        "KVFLOW_ADMIN_KEY",
        "HYDRA_FULL_ERROR",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVFLOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence on standard error, of a command that is refused and does nothing."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("kvflow: ")
    assert err.count("\n") == 1
    return err.removeprefix("kvflow: ").rstrip("\n")


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    for verb in ("serve", "plan", "key", "policy", "version"):
        assert f"\n  {verb} " in out


def test_help_of_a_verb_lists_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0
    assert "policy: adaptive, aggressive, balanced, conservative, off" in out
    assert "start_timeout_s: 600.0" in out


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(capsys: pytest.CaptureFixture[str], word: str) -> None:
    code, out, _ = run(capsys, word)
    assert code == 0
    assert out.startswith("kvflow ")
    assert "\nhydra-core 1.3." in out


def test_plan_in_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "plan", "cluster=p5en_efa", "model=glm5", "format=json", *CLUSTERS["p5en_efa"])
    assert (code, err) == (0, "")
    assert [n["name"] for n in json.loads(out)["nodes"]] == ["prefill-0", "decode-0"]
    assert list((tmp_path / "cwd").iterdir()) == []
    assert not (tmp_path / "cache").exists()


def test_plan_of_hosts_that_nobody_named_yet(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "cluster=p5en_efa")
    assert code == 0
    assert "prefill.invalid" in out


def test_serve_of_hosts_that_nobody_named_yet(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "serve", "cluster=p5en_efa")
    assert sentence.startswith("cluster.prefill.hosts: prefill.invalid stands for a host of yours; name it, as in ")


def test_flags_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = run(capsys, "plan", "-c", "job", "-p", "router", "router.port=9000")
    assert wanted[0] == 0
    assert "port: 9000" in wanted[1]
    assert run(capsys, "plan", "router.port=9000", "--package=router", "--cfg", "job") == wanted
    assert run(capsys, "plan", "-c", "job", "router.port=9000", "-p", "router") == wanted


def test_a_package_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "plan", "-c", "job", "-p", "nothing") == (1, "", "package 'nothing' not found in config\n")


def test_config_dir_adds_names_and_shadows_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path / "mine/policy/mine.yaml", "defaults: [balanced]\nname: mine\n")
    write(tmp_path / "mine/policy/off.yaml", "name: shadow\n")
    directory = str(tmp_path / "mine")
    assert "  policy   mine\n" in run(capsys, "plan", "policy=mine", "--config-dir", directory)[1]
    assert "  policy   off\n" in run(capsys, "plan", "policy=off", "-cd", directory)[1]


def test_the_users_directories_come_before_config_dir(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        write(tmp_path / name / "policy/mine.yaml", f"defaults: [balanced]\nname: {name}\n")
    monkeypatch.setenv("KVFLOW_CONFIG_PATH", str(tmp_path / "first"))
    assert "  policy   first\n" in run(capsys, "plan", "policy=mine", "-cd", str(tmp_path / "second"))[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sreve", "sreve: no such verb; there are serve, plan, key, policy, version (kvflow --help says more)."),
        ("router.port=1", "router.port=1: no such verb; "),
        ("serve -m", "-m: kvflow serve takes one configuration at a time and cannot sweep over several."),
        ("serve policy=off,balanced --multirun", "--multirun: kvflow serve takes one configuration at a time "),
        ("serve hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: kvflow serve takes one configuration at a time "),
        ("serve --port 9000", "--port: no such flag; there are --help, "),
        ("serve policy=balancd", "policy=balancd: no such option; policy is one of adaptive, aggressive, balanced, "),
        (
            "plan policy=off,balanced",
            "policy: one option, please, not off,balanced; kvflow takes one configuration at a time and cannot sweep ",
        ),
        ("serve polcy=off", "polcy: no such key; "),
        ("serve router.prt=1", "router.prt: no such key; router has host, port, "),
        ("serve router.port=abc", "router.port: 'abc' is not a whole number."),
        ("serve cluster.device=tpu", "cluster.device: 'tpu' is not one of auto, cpu, cuda."),
        ("plan format=xml", "format: 'xml' is not one of table, json."),
        ("serve format=json", "format: no such key; "),
        ("serve policy.retention.ttl_s=-1", "policy.retention.ttl_s must be "),
        ("plan policy.retention.max_pinned_share=2", "policy.retention.max_pinned_share must be from 0 to 1, got 2"),
        ("serve cluster.prefill.replicas=0", "cluster.prefill.replicas must be at least 1, got 0."),
        ("serve cluster.decode.replicas=0", "cluster.decode.replicas must be at least 1, got 0."),
        ("serve router.port=8100", "cluster.prefill.port: port 8100 is already taken by router.port."),
        ("serve cluster=external", "cluster.prefill.urls: give at least one, "),
        ("serve model.path=/nowhere/at/all", "model.path: /nowhere/at/all is neither an existing directory, nor "),
        ("serve model.path=.", "model.path: . holds no model (there is no config.json in it)."),
        ("serve policy._target_=os.system", "policy._target_: 'os.system' is not allowed; "),
        ("serve --config-dir /nowhere/at/all", "--config-dir: there is no directory /nowhere/at/all."),
        ("plan --config-name serve", "--config-name: the verb chooses the configuration; --config-dir adds "),
        ("plan -cn=serve", "-cn: the verb chooses the configuration; "),
        ("serve --config-path /tmp", "--config-path: the verb chooses the configuration; "),
        ("serve router.port=1 -cp", "-cp: the verb chooses the configuration; "),
        ("key tenat=acme", "tenat: kvflow key takes tenant= (kvflow key --help says more)."),
        ("key tenant=", "tenant: give it the name of a tenant, as in tenant=..."),
        ("key tenant=a§b", "tenants.a§b: a tenant's name is 1 to 64 letters, digits, "),
        ("policy acme", "acme: kvflow policy takes tenant=, policy=, url= (kvflow policy --help says more)."),
        ("policy policy=off", "tenant: say whose policy it is to be, as in tenant=acme."),
        ("policy tenant=a tenant=b", "tenant: was given twice."),
        ("policy tenant=a", "KVFLOW_ADMIN_KEY: put the server's admin key there."),
        ("plan --config-dir", "--config-dir: give it a value."),
        ("serve -c", "-c: give it one of job, hydra, all."),
        ("plan --cfg none", "--cfg: give it one of job, hydra, all."),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    assert refused(capsys, *words.split()).startswith(sentence)


def test_the_installed_command(tmp_path: Path) -> None:
    """The entry point, its exit code, and no traceback."""
    program = Path(sys.executable).with_name("kvflow")
    result = subprocess.run([program, "serve", "policy=x"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr
        == "kvflow: policy=x: no such option; policy is one of adaptive, aggressive, balanced, conservative, off.\n"
    )


@pytest.mark.parametrize("words", ["plan", "plan --info searchpath", "plan -c job", "serve --help"])
def test_a_reader_that_has_had_enough(tmp_path: Path, words: str) -> None:
    command = [sys.executable, "-m", "kvflow", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_what_hydra_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", "--info", "searchpath")
    assert (code, err) == (0, "")
    assert "Config search path" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kvflow ", {"serve", "plan", "key", "policy", "version"}),
        ("kvflow pl", {"plan"}),
        ("kvflow policy ", {"tenant=", "policy=", "url="}),
        ("kvflow key t", {"tenant="}),
        (
            "kvflow serve policy=",
            {f"policy={p}" for p in ["off", "conservative", "balanced", "aggressive", "adaptive"]},
        ),
        ("kvflow serve -c job model=q", {"model=qwen3_32b"}),
        ("kvflow plan router.po", {"router.port="}),
        ("kvflow version ", set()),
    ],
)
def test_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, words: set[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    code, out, err = run(capsys, "-sc", "query=bash")
    assert (code, err) == (0, "")
    assert set(out.split()) == words
    assert os.environ["COMP_LINE"] == line


def test_the_script_that_installs_completion(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "-sc", "install=bash")
    assert code == 0
    assert out.rstrip().endswith("hydra_bash_completion kvflow")


# Keys, and a running server


def test_a_tenants_key_and_the_line_that_stands_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "key", "tenant=acme")
    assert (code, err) == (0, "")
    _, key, _, line = (text.strip() for text in out.splitlines())
    assert Keys.parse(line, ["acme"]).tenant_of(key) == "acme"
    assert key not in line
    assert run(capsys, "key", "tenant=acme")[1] != out


def test_an_admin_key(capsys: pytest.CaptureFixture[str]) -> None:
    _, key, _, line = (text.strip() for text in run(capsys, "key")[1].splitlines())
    assert AdminKey.parse(line, "here").fits(key)
    assert not AdminKey.parse(line, "here").fits(line)


@pytest.mark.parametrize("verb", ["key", "policy"])
def test_help_of_verbs_that_compose_nothing(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, err = run(capsys, verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"kvflow {verb} [")


@pytest.mark.parametrize(
    ("key", "words", "code", "sentence"),
    [
        ("secret", "url=http://127.0.0.1:1", 1, "http://127.0.0.1:1 cannot be asked: connection refused."),
        ("secret", "url=localhost:8000", 2, "url: localhost:8000 is not of the form http://127.0.0.1:8000."),
        ("secret", "url=http://a b", 2, "url: http://a b is not of the form http://127.0.0.1:8000."),
        ("secret", "url=http://a/ü", 2, "url: http://a/ü is not of the form http://127.0.0.1:8000."),
        ("secret", "url=http://a..b", 2, "url: http://a..b is not of the form http://127.0.0.1:8000."),
        ("secret", "url=http://a:b", 2, "url: http://a:b is not of the form http://127.0.0.1:8000."),
        ("sha256:0123", "tenant=a", 2, "KVFLOW_ADMIN_KEY: holds the hash of a key; the server wants the key itself."),
        ("two words", "tenant=a", 2, "KVFLOW_ADMIN_KEY: holds no key."),
    ],
)
def test_a_server_that_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str, words: str, code: int, sentence: str
) -> None:
    monkeypatch.setenv("KVFLOW_ADMIN_KEY", key)
    assert run(capsys, "policy", words) == (code, "", f"kvflow: {sentence}\n")
