"""Dockerfiles, compose file and manifest against the rules that linters for them check. Images are not built here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "containers"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))
INSTRUCTIONS = {
    *("FROM", "ARG", "RUN", "COPY", "USER", "WORKDIR", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"),
    "ENTRYPOINT",
}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word[0], re.sub(r"\s+", " ", word[1])) for word in found]


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda", ".rocm", ".xpu"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix[1:])
class TestDockerfile:
    def test_instructions_are_known_and_in_order(self, dockerfile: Path) -> None:
        found = instructions(dockerfile)
        assert {name for name, _ in found} <= INSTRUCTIONS
        assert found[0][0] == "FROM" and found[-1][0] == "ENTRYPOINT"

    def test_the_base_is_pinned(self, dockerfile: Path) -> None:
        """DL3006, DL3007: a tag, and not latest."""
        image = dict(instructions(dockerfile))["FROM"]
        assert ":" in image and not image.endswith(":latest")

    def test_apt_and_pip_leave_nothing_behind(self, dockerfile: Path) -> None:
        """DL3008/9/14/15 and DL3042: no recommended packages, lists removed in the same layer, no cache of pip."""
        for name, text in instructions(dockerfile):
            if name == "RUN" and "apt-get install" in text:
                assert "apt-get update &&" in text and "--yes" in text and "--no-install-recommends" in text
                assert "rm -rf /var/lib/apt/lists/*" in text
            if name == "RUN" and "pip install" in text:
                assert text.count("pip install") == text.count("--no-cache-dir")
        assert not any(
            name == "RUN" and re.search(r"\b(sudo|apt|cd)\s", text) for name, text in instructions(dockerfile)
        )

    def test_it_runs_as_nobody_special_in_exec_form(self, dockerfile: Path) -> None:
        """DL3002, DL3000, DL3025: last user is not root, absolute folder, JSON entry point."""
        found = instructions(dockerfile)
        users = [text for name, text in found if name == "USER"]
        assert users and users[-1] not in ("root", "0")
        assert all(text.startswith("/") for name, text in found if name == "WORKDIR")
        assert found[-1][1] == '["/usr/local/bin/trimaran-entrypoint"]'
        assert sum(name == "HEALTHCHECK" and "/ready" in text for name, text in found) == 1
        assert ("STOPSIGNAL", "SIGTERM") in found

    def test_what_it_copies_exists(self, dockerfile: Path) -> None:
        for name, text in instructions(dockerfile):
            if name == "COPY":
                source = next(word for word in text.split() if not word.startswith("--"))
                assert (FOLDER.parent / source).exists(), source

    def test_its_variables_are_options(self, dockerfile: Path) -> None:
        """A TRIMARAN_ variable that no option knows would be refused at every start."""
        from trimaran.frontend.launch.options import read_options

        env = dict(instructions(dockerfile))["ENV"]
        variables = dict(word.split("=", 1) for word in env.split() if word.startswith("TRIMARAN_"))
        assert set(variables) == {"TRIMARAN_CACHE_DIR", "TRIMARAN_HOST"}
        assert read_options(["model"], variables).options.host == "0.0.0.0"


def test_compose_file() -> None:
    composed: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    service = composed["services"]["trimaran"]
    assert service["shm_size"] == "1g"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to the network without a key"
    assert service["healthcheck"]["test"][-1].endswith("/ready")
    volumes = {volume.split(":")[0] for volume in service["volumes"]}
    assert set(composed["volumes"]) <= volumes
    assert (FOLDER / service["build"]["dockerfile"].replace("${PLATFORM:-cuda}", "cuda").split("/")[-1]).is_file()


def test_manifest_probes_and_shared_memory() -> None:
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["startupProbe"]["httpGet"]["path"] == "/health"
    assert {port["name"] for port in container["ports"]} >= {container["readinessProbe"]["httpGet"]["port"]}
    mounts, volumes = container["volumeMounts"], {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounts} == set(volumes)
    shared = next(mount for mount in mounts if mount["mountPath"] == "/dev/shm")
    assert volumes[shared["name"]]["emptyDir"]["medium"] == "Memory"
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > 30, "the drain limit must fit in"
