//! Chromium without a window, driven through the DevTools protocol on two pipes: JSON messages that end with a zero byte.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use dropless_core::{Error, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

/// How long a recording may take.
const PATIENCE: Duration = Duration::from_secs(240);

/// The program.
pub(crate) fn find() -> Result<String> {
    let name = "chromium";
    let asked = Command::new(name).arg("--version").stderr(Stdio::null()).output();
    match asked {
        Ok(said) if said.status.success() => Ok(name.into()),
        _ => Err(Error::Unavailable { backend: "browser", why: format!("no program {name}") }),
    }
}

/// A running browser with one page.
pub(crate) struct Chromium {
    child: Child,
    ask: ChildStdin,
    hear: BufReader<ChildStdout>,
    session: Option<String>,
    messages: u64,
    complaints: Vec<String>,
    /// What it keeps on disk.
    _profile: TempDir,
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the page shows in the end.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) state: String,
    pub(crate) status: String,
    pub(crate) digest: String,
    pub(crate) verdict: String,
    pub(crate) report: String,
    pub(crate) page: String,
}

impl Chromium {
    pub(crate) fn start(program: &str) -> Chromium {
        let profile = tempfile::tempdir().unwrap();
        // The browser reads from descriptor 3 and writes to 4. Tests may run as root, which its sandbox refuses.
        let script = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut child = Command::new("sh")
            .args(["-c", script, program, "--headless=new", "--no-sandbox", "--remote-debugging-pipe"])
            .args(["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-first-run"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (ask, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut browser =
            Chromium { child, ask, hear, session: None, messages: 0, complaints: Vec::new(), _profile: profile };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = Some(text(&browser.call("Target.attachToTarget", &target)["sessionId"]));
        browser.call("Runtime.enable", &json!({}));
        browser
    }

    /// What the page's scripts failed with.
    pub(crate) fn complaints(&self) -> &[String] {
        &self.complaints
    }

    /// Sends a command and waits for its result.
    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.messages += 1;
        let id = self.messages;
        let mut message = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.ask.write_all(format!("{message}\0").as_bytes()).unwrap();
        self.ask.flush().unwrap();
        loop {
            let mut heard = Vec::new();
            self.hear.read_until(0, &mut heard).unwrap();
            assert_eq!(heard.pop(), Some(0), "the browser ended");
            let heard: Value = serde_json::from_slice(&heard).unwrap();
            if heard["method"] == "Runtime.exceptionThrown" {
                self.complaints.push(heard["params"].to_string());
            }
            if heard["id"] == id {
                assert!(heard.get("error").is_none(), "{method}: {heard}");
                return heard["result"].clone();
            }
        }
    }

    fn evaluate(&mut self, expression: &str) -> Value {
        let result = self.call("Runtime.evaluate", &json!({ "expression": expression, "returnByValue": true }));
        result["result"]["value"].clone()
    }

    fn wait(&mut self, what: &str, condition: &str) {
        let began = Instant::now();
        while self.evaluate(condition) != true {
            assert!(began.elapsed() < PATIENCE, "{what}: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Lets the page run a recording of its folder.
    pub(crate) fn replay(&mut self, address: &str, name: &str) -> Shown {
        self.call("Page.navigate", &json!({ "url": format!("{address}/?recording=recordings/{name}") }));
        let here = format!("location.search.endsWith('/{name}') && document.documentElement.dataset.state");
        self.wait(name, &format!("{here} === 'idle'"));
        self.evaluate("document.getElementById('linked').click()");
        self.wait(name, "!['idle', 'running'].includes(document.documentElement.dataset.state)");
        self.shown()
    }

    fn shown(&mut self) -> Shown {
        let shown = self.evaluate(
            "(() => {
                const text = (selector) => document.querySelector(selector)?.textContent ?? '';
                return [document.documentElement.dataset.state ?? '', text('#status'), text('#verdict strong'),
                    text('#verdict'), text('#report'), document.body.innerText];
            })()",
        );
        let [state, status, digest, verdict, report, page] = std::array::from_fn(|i| text(&shown[i]));
        Shown { state, status, digest, verdict, report, page }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
