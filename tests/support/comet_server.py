"""A Comet server on this machine, for tests: it keeps what runs send to it.

    with CometServer() as server:
        run("01-single-gpu", 1, *flags, COMET_URL_OVERRIDE=server.url, COMET_API_KEY="any")
        (experiment,) = server.experiments.values()
        assert ("loss", 1) in experiment.metrics

A run needs these two variables and no network. The server also takes the archives of offline runs,
which `comet upload` sends. The endpoints are those of comet_ml 3.58: see its modules
connection/connection_url_helpers.py and connection/connection_api.py.
"""

import email
import gzip
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

# The path of a request is one of these and the name of an endpoint.
PREFIXES = ("/clientlib/rest/v2/", "/api/rest/v2/", "/clientlib/")
# The code of the error that an experiment exists already (EXPERIMENT_ALREADY_EXISTS in comet_ml).
ALREADY_EXISTS = 90999
# Tells a run how often it should say that it is alive. How often it logs metrics of the machine is
# not up to the server: see the variables COMET_SYSTEM_CPU_INTERVAL, COMET_SYSTEM_GPU_INTERVAL, ...
INTERVALS = {
    "is_alive_beat_duration_millis": 5000,
    "gpu_monitor_interval_millis": 5000,
    "cpu_monitor_interval_millis": 5000,
    "parameter_update_interval_millis": 1000,
}
# Answers that do not depend on the request. What such a request sends is not kept.
CONSTANT_ANSWERS = {
    # A version that is new enough for all that the library can do.
    "isAlive/ver": {"version": "4.35.0"},
    "health/ping": {},
    "asset/3d-limits": {"maxPoints": 1000, "maxBoxes": 1000},
    # A run asks at its end whether the server has limited what it logs.
    "experiment/metadata": {"throttle": False},
    "notify/event": {},
    "notification/experiment": {},
    "status-report/offline-metadata": {},
    "write/experiment/html": {},
    "write/experiment/output": {},
    "write/experiment/file-path": {},
    "write/experiment/git/metadata": {},
    "write/experiment/graph": {},
}


class CometExperiment:
    """What the server knows about an experiment."""

    def __init__(self, key, project, workspace, url):
        self.key = key
        self.project = project
        self.workspace = workspace
        self.url = url  # the address of its page, `experiment.url` in the run
        self.name = None
        self.tags = set()
        self.parameters = {}
        self.metrics = {}  # by (name, step), the value that was sent last
        self.others = {}
        self.texts = []
        self.system = {}  # details of the machine, and the last values of the metrics sys.*
        self.files = {}  # contents by name
        self.errors = []  # what the library reported about itself
        self.runs = {}  # whether a run is alive, by its id, in the order of their starts

    @property
    def starts(self):
        """How many runs have logged to this experiment: the first one and those that continued."""
        return len(self.runs)

    @property
    def ended(self):
        """Whether the last run has said that it ended."""
        return bool(self.runs) and not list(self.runs.values())[-1]


class CometServer:
    """A server on a free port of 127.0.0.1 that is there until the end of the `with` block.

    Hold `lock` to read from it while a run may be sending."""

    def __init__(self):
        self.lock = threading.Lock()
        self.experiments = {}  # by key
        self.requests = []  # (method, path) of each request
        self.unknown = []  # those to which the server has no answer but {}

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

    def answer(self, method, path, values):
        """The HTTP status and the values of the answer to a request."""
        endpoint = path
        for prefix in PREFIXES:
            endpoint = endpoint.removeprefix(prefix)

        with self.lock:
            self.requests.append((method, path))
            if endpoint in CONSTANT_ANSWERS:
                return 200, CONSTANT_ANSWERS[endpoint]
            if endpoint == "logger/add/run":
                return self.add_run(values)

            names = ("experimentKey", "experimentId", "previousExperiment")
            experiment = self.experiments.get(next((values[n] for n in names if n in values), None))
            if experiment is None or endpoint not in ENDPOINTS:
                self.unknown.append((method, path))
                return 200, {}
            return 200, ENDPOINTS[endpoint](experiment, values) or {}

    def add_run(self, values):
        """Creates an experiment.

        `comet_ml.start` asks twice: it tries to create the experiment, only to see whether the key
        exists. Then it starts the run, here if the key was new, else with logger/get/run."""
        key = values["experimentKey"]
        if key not in self.experiments:
            project = values["projectName"] or "general"
            workspace = values["teamName"] or "default-workspace"
            url = f"{self.root}/{workspace}/{project}/{key}"
            self.experiments[key] = CometExperiment(key, project, workspace, url)
        elif not values["getOrCreateEnabled"]:
            return 400, {"sdk_error_code": ALREADY_EXISTS, "msg": f"{key} exists"}
        return 200, start_run(self.experiments[key], values)


# What the server does at each endpoint, with the values of the request: those of its query and
# those of its body.


def start_run(experiment, values):
    """Tells a run what it has to know. It counts as started when it says that it is alive."""
    return {
        "runId": uuid.uuid4().hex,
        "project_id": f"{experiment.workspace}/{experiment.project}",
        "focusUrl": experiment.url.removesuffix(experiment.key),
        "name": experiment.name,
    }


def record_status(experiment, values):
    """A run says that it is alive when it starts and at intervals, and that it is not at its end.

    What was under way when it ended may arrive late, and changes nothing."""
    if values["is_alive"]:
        experiment.runs.setdefault(values["runId"], True)
    else:
        experiment.runs[values["runId"]] = False
    return INTERVALS


def record_error(experiment, values):
    experiment.errors.append(values["error"])


def record_tags(experiment, values):
    experiment.tags.update(values["addedTags"])


def record_parameters(experiment, values):
    for item in values["values"]:
        experiment.parameters[item["parameterName"]] = item["parameterValue"]


def record_metrics(experiment, values):
    """Numbers that JSON does not have arrive as the strings NaN, Infinity and -Infinity."""
    for item in values["values"]:
        name, number = item["metricName"], float(item["metricValue"])
        if name.startswith("sys."):
            experiment.system[name] = number
        else:
            experiment.metrics[name, item["step"]] = number


def record_other(experiment, values):
    experiment.others[values["key"]] = values["value"]
    if values["key"] == "Name":
        experiment.name = values["value"]


def record_system(experiment, values):
    """Each request has some of the details. The others are missing or null."""
    known = {name: value for name, value in values.items() if value is not None}
    del known["experimentKey"]
    experiment.system |= known


def record_file(experiment, values):
    """The file is a part of the body, its name and type are in the query."""
    content = values.get("file", values.get("link"))
    if values.get("type") == "text-sample":
        experiment.texts.append(content.decode())
    else:
        experiment.files[values.get("fileName", values.get("type"))] = content


def get_tags(experiment, values):
    return {"tags": sorted(experiment.tags)}


ENDPOINTS = {
    "logger/get/run": start_run,
    "status-report/update": record_status,
    "write/experiment/update-status": record_error,
    "tags/add-tags-to-experiment": record_tags,
    "batch/logger/experiment/parameter": record_parameters,
    "batch/logger/experiment/metric": record_metrics,
    "write/experiment/log-other": record_other,
    "write/experiment/system-details": record_system,
    "write/experiment/cloud-details": record_system,
    "asset/upload": record_file,
    "visualizations/upload": record_file,
    "git-patch/upload": record_file,
    "experiment/tags": get_tags,
}


class Handler(BaseHTTPRequestHandler):
    """Reads a request and writes the server's answer.

    Each request has a connection of its own (HTTP/1.0), so none is left when the server closes."""

    def do_GET(self):
        address = urlsplit(self.path)
        query = {name: texts[-1] for name, texts in parse_qs(address.query).items()}
        status, values = self.server.comet.answer(
            self.command, address.path, {**query, **self.read_body()}
        )
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
        """Prints nothing: `CometServer.requests` has the requests."""
