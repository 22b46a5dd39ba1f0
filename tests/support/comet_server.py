"""A Comet server on this machine, which keeps what a run sends to it.

    with CometServer() as server:
        run("01-single-gpu", 1, *flags, COMET_URL_OVERRIDE=server.url, COMET_API_KEY="any")
        [experiment] = server.experiments.values()
        assert ("train/loss", 1) in experiment.metrics

The endpoints are those of comet_ml 3.58: see its modules connection/connection_url_helpers.py and
connection/connection_api.py.
"""

import email
import gzip
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

# The path of a request is one of these and the name of an endpoint.
PREFIXES = ("/clientlib/rest/v2/", "/api/rest/v2/", "/clientlib/")
ALREADY_EXISTS = 90999  # EXPERIMENT_ALREADY_EXISTS in comet_ml
# How often a run should say that it is alive, and log the load of the machine.
INTERVALS = ("is_alive_beat_duration", "gpu_monitor_interval", "cpu_monitor_interval")
INTERVALS = {f"{name}_millis": 5000 for name in (*INTERVALS, "parameter_update_interval")}
# Answers that do not depend on the request. What such a request sends is not kept.
CONSTANT = {"isAlive/ver": {"version": "4.35.0"}, "experiment/metadata": {"throttle": False}}
CONSTANT["asset/3d-limits"] = {"maxPoints": 1000, "maxBoxes": 1000}
IGNORED = {"health/ping", "notify/event", "notification/experiment"}
IGNORED |= {"status-report/offline-metadata"}
IGNORED |= {f"write/experiment/{name}" for name in ("html", "output", "file-path", "graph")}
IGNORED |= {"write/experiment/git/metadata", "git-patch/upload", "visualizations/upload"}


class CometServer:
    """A server on a free port of 127.0.0.1 that is there until the end of the `with` block."""

    def __init__(self):
        self.lock = threading.Lock()
        self.experiments = {}  # by key
        self.unknown = []  # requests to which the server has no answer but {}
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.comet = self
        self.root = f"http://127.0.0.1:{self.http.server_port}"
        self.url = f"{self.root}/clientlib/"  # for COMET_URL_OVERRIDE

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def answer(self, path, values):
        """The HTTP status and the answer to a request with the values of its query and its body."""
        for prefix in PREFIXES:
            path = path.removeprefix(prefix)
        with self.lock:
            if path in CONSTANT or path in IGNORED:
                return 200, CONSTANT.get(path, {})
            if path == "logger/add/run":
                return self.add_run(values)
            names = ("experimentKey", "experimentId", "previousExperiment")
            experiment = self.experiments.get(next((values[n] for n in names if n in values), None))
            if experiment is None:
                self.unknown.append(path)
                return 200, {}
            return 200, self.record(experiment, path, values) or {}

    def add_run(self, values):
        """Creates an experiment. `comet_ml.start` asks twice: first only to see whether the key
        exists, then it starts the run, here if the key was new, else with logger/get/run."""
        key = values["experimentKey"]
        if key not in self.experiments:
            project = values["projectName"] or "general"
            url = f"{self.root}/{values['teamName'] or 'default-workspace'}/{project}/{key}"
            fields = {"key": key, "project": project, "url": url, "name": None, "tags": set()}
            fields |= {"parameters": {}, "metrics": {}, "others": {}, "system": {}}
            # Whether a run is alive, by its id, in the order of their starts.
            self.experiments[key] = SimpleNamespace(**fields, runs={})
        elif not values["getOrCreateEnabled"]:
            return 400, {"sdk_error_code": ALREADY_EXISTS, "msg": f"{key} exists"}
        return 200, self.record(self.experiments[key], "logger/get/run", values)

    def record(self, experiment, endpoint, values):
        if endpoint == "logger/get/run":
            url = experiment.url.removesuffix(experiment.key)
            answer = {"runId": uuid.uuid4().hex, "project_id": "p", "focusUrl": url}
            return answer | {"name": experiment.name}
        if endpoint == "status-report/update":
            alive = values["is_alive"] and experiment.runs.get(values["runId"], True)
            experiment.runs[values["runId"]] = alive
            return INTERVALS
        if endpoint == "tags/add-tags-to-experiment":
            experiment.tags.update(values["addedTags"])
        elif endpoint == "experiment/tags":
            return {"tags": sorted(experiment.tags)}
        elif endpoint == "batch/logger/experiment/parameter":
            pairs = [(item["parameterName"], item["parameterValue"]) for item in values["values"]]
            experiment.parameters.update(pairs)
        elif endpoint == "batch/logger/experiment/metric":
            for item in values["values"]:
                name, number = item["metricName"], float(item["metricValue"])
                if name.startswith("sys."):
                    experiment.system[name] = number
                else:
                    experiment.metrics[name, item["step"]] = number
        elif endpoint == "write/experiment/log-other":
            experiment.others[values["key"]] = values["value"]
            if values["key"] == "Name":
                experiment.name = values["value"]
        elif endpoint in ("write/experiment/system-details", "write/experiment/cloud-details"):
            experiment.system |= values
        else:
            self.unknown.append(endpoint)


class Handler(BaseHTTPRequestHandler):
    """Reads a request and writes the server's answer, each on a connection of its own."""

    def do_GET(self):
        address = urlsplit(self.path)
        query = {name: texts[-1] for name, texts in parse_qs(address.query).items()}
        status, values = self.server.comet.answer(address.path, {**query, **self.read_body()})
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_GET

    def read_body(self):
        """The values in the body: JSON, which may be compressed, or several parts with names."""
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        if not content:
            return {}
        if self.headers.get_content_maintype() != "multipart":
            return json.loads(content)
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        parts = email.message_from_bytes(head + content).get_payload()
        return {
            part.get_param("name", header="Content-Disposition"): part.get_payload(decode=True)
            for part in parts
        }

    def log_message(self, *details):
        """Prints nothing."""
