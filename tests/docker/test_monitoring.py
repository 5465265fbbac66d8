"""What Prometheus and Grafana are given: every query can be parsed and asks for metrics that somebody publishes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from docker_double import interpolated

import trtspec.triton
from trtspec.spec.schema import Serving

DOCKER = Path(__file__).parents[2] / "docker"
PROMETHEUS, GRAFANA = DOCKER / "prometheus", DOCKER / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "trtspec.json").read_text())
RULES = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
METRICS = Path(trtspec.triton.__file__).parent / "models" / "metrics.py"
# Triton's own with their labels; test_metrics.py finds them on the endpoint of a real server.
TRITON = {
    f"nv_inference_{name}": {"model", "version"}
    for name in (
        *("request_success", "request_failure", "count", "exec_count", "pending_request_count"),
        *("request_duration_us", "queue_duration_us", "compute_infer_duration_us"),
    )
} | {"up": {"job", "instance"}}
GRAFANA_VALUES = {"$__rate_interval": "1m", "$model": "a|b"}
EXPRESSIONS = [
    *((f"panel {p['id']} {t['refId']}", t["expr"]) for p in DASHBOARD["panels"] for t in p.get("targets", ())),
    *((rule["alert"], rule["expr"]) for rule in RULES),
]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Name of a metric -> its labels."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("metrics_of_the_pipeline", METRICS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return TRITON | {name: {"model", family.label or "model"} for name, family in module.FAMILIES.items()}


def parsed(expression: str) -> promql_parser.Expr:
    for name, value in GRAFANA_VALUES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def selectors(expression: promql_parser.Expr) -> Iterator[tuple[str, set[str]]]:
    """Metrics that an expression asks for, with all labels that are matched, or kept by the aggregation around."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(expression, found.append)
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr):
            assert node.modifier is None or "By" in str(node.modifier.type)
            kept = set(node.modifier.labels) if node.modifier else set()
            yield from ((name, labels | kept) for name, labels in selectors(node.expr))
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name
            yield node.name, {matcher.name for matcher in node.matchers.matchers}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_queries_ask_for_what_is_published(where: str, expression: str, published: dict[str, set[str]]) -> None:
    asked = list(selectors(parsed(expression)))
    assert asked, "a number instead of a query"
    for name, labels in asked:
        assert name in published and labels <= published[name], (name, labels)
        assert name in ("up", "trtspec_requests_in_flight") or name.endswith("_count") or _is_in_range(name, expression)


def _is_in_range(counter: str, expression: str) -> bool:
    """Whether a counter, whose value by itself says nothing, stands in rate() or increase() wherever it is used."""
    uses = len(re.findall(rf"\b{counter}\b", expression))
    return uses == len(re.findall(rf"\b(?:rate|increase)\({counter}(?:{{[^}}]*}})?\[", expression))


@pytest.mark.parametrize("wrong", ["sum by (model) rate(up[5m])", "rate(up)", "sum(up[5m])", "up{job=}"])
def test_the_parser_would_notice(wrong: str) -> None:
    with pytest.raises(ValueError):
        parsed(wrong)


def test_the_dashboard_shows_everything_that_the_pipeline_counts(published: dict[str, set[str]]) -> None:
    shown = " ".join(expression for where, expression in EXPRESSIONS if where.startswith("panel"))
    assert {name for name in published if name.startswith("trtspec_") and name not in shown} == set()


def test_panels_lie_beside_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        taken = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken and max(x for x, _ in taken) < 24, panel["title"]
        cells |= taken
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_say_what_they_show_and_take_their_values_from_the_variables() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel))) - {"__rate_interval"}
            assert "datasource" in used and used <= variables
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
            letters = [target["refId"] for target in panel["targets"]]
            assert letters == sorted(set(letters))


def test_alerts_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 5
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        labels = {label for _, asked in selectors(parsed(rule["expr"])) for label in asked} | {"instance"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    assert all(rule["alert"] in tested for rule in RULES)


def test_prometheus_reads_the_server_and_grafana_reads_prometheus() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{Serving().metrics_port}"]}]
    assert job["job_name"] in RULES[0]["expr"] and config["rule_files"] == ["alerts.yml"]
    services = yaml.safe_load((DOCKER / "monitoring.yaml").read_text())["services"]
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in services["prometheus"]["command"]
    selected = DASHBOARD["templating"]["list"][0]["current"]
    assert (source["uid"], source["type"]) == (selected["value"], DASHBOARD["templating"]["list"][0]["query"])
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "trtspec.yml").read_text())["providers"]
    mounts = {volume["target"]: volume["source"] for volume in services["grafana"]["volumes"]}
    assert (DOCKER / mounts[provider["options"]["path"]] / "trtspec.json").is_file()
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (DOCKER / mounts[str(home.parent)] / home.name).is_file()


def test_monitoring_is_reached_from_this_machine_only_and_may_do_little() -> None:
    services = interpolated(yaml.safe_load((DOCKER / "monitoring.yaml").read_text()), {})["services"]
    for service in services.values():
        assert re.fullmatch(r"[\w-]+/\w+:v?\d+\.\d+\.\d+", service["image"])
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "ports", "pid", "ipc"} & service.keys()
        binds = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        assert binds and all(volume["read_only"] and (DOCKER / volume["source"]).is_dir() for volume in binds)
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of the package prometheus, is not installed")
@pytest.mark.parametrize("command", [["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_agrees(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
