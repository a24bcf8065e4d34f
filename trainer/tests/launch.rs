//! `dropless launch`, with shell commands as ranks.

#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use dropless::options::BackendKind;

/// A launch whose ranks run a line of shell.
fn command(ranks: &str, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dropless"));
    command.args(["launch", "--nproc", ranks, "--program", "sh", "--", "-c", line]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn launch(ranks: &str, line: &str) -> Output {
    command(ranks, line).output().unwrap()
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Waits until a rank has made the file.
fn made(path: &std::path::Path) {
    let started = Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < Duration::from_secs(20), "{} is not made", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal by its name.
fn signal(process: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &process.id().to_string()]).status().unwrap().success());
}

#[test]
fn ranks_get_the_variables_of_torchrun() {
    let output = launch("3", "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR");
    assert!(output.status.success());
    assert_eq!(lines(&output.stdout), ["0 3 0 3 127.0.0.1"]);
    assert_eq!(lines(&output.stderr), ["rank 1: 1 3 1 3 127.0.0.1", "rank 2: 2 3 2 3 127.0.0.1"]);
}

#[test]
fn ranks_agree_on_a_free_port_and_a_run_of_their_own() {
    let line = "echo $MASTER_PORT $TORCHELASTIC_RUN_ID >&2";
    let [one, other] = [(); 2].map(|()| launch("2", line));
    let words = |output: &Output| {
        let lines = lines(&output.stderr);
        assert_eq!(format!("rank 1: {}", lines[0]), lines[1]);
        lines[0].split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    let (one, other) = (words(&one), words(&other));
    assert_ne!(one[1], other[1]);
    TcpListener::bind(("127.0.0.1", one[0].parse().unwrap())).unwrap();
}

#[test]
fn f20_the_ranks_of_a_launch_have_a_secret_of_their_own() {
    let line = "echo $DROPLESS_SECRET:$DROPLESS_SECRET_FILE:$DROPLESS_LISTEN >&2";
    let [one, other] = [(); 2].map(|()| {
        // Whatever the environment says: it may be that of another job.
        let mut launch = command("2", line);
        launch.env("DROPLESS_SECRET", "that of another job").env("DROPLESS_SECRET_FILE", "/secret");
        let lines = lines(&launch.env("DROPLESS_LISTEN", "::").output().unwrap().stderr);
        assert_eq!(format!("rank 1: {}", lines[0]), lines[1]);
        lines[0].clone()
    });
    assert_ne!(one, other);
    let digits = one.strip_suffix("::").unwrap();
    assert!(digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()), "{one}");
}

#[test]
fn a_port_can_be_given() {
    let arguments = ["launch", "--nproc", "1", "--master-port", "4321", "--program", "sh", "--", "-c"];
    let output =
        Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).arg("echo $MASTER_PORT").output().unwrap();
    assert_eq!(lines(&output.stdout), ["4321"]);
}

#[test]
fn without_a_program_the_ranks_are_dropless() {
    let arguments = ["launch", "--nproc", "2", "--", "--version"];
    let output = Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).output().unwrap();
    let version = format!("dropless {}", env!("CARGO_PKG_VERSION"));
    assert_eq!(lines(&output.stderr), [format!("rank 1: {version}")]);
    assert_eq!(lines(&output.stdout), [version]);
}

#[test]
fn only_ranks_of_cuda_are_processes() {
    let arguments = ["launch", "--nproc", "2", "--", "train", "--backend", "host", "--print-config"];
    let output = Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("start one, with --ranks"), "{output:?}");
}

#[test]
fn processes_say_why_they_cannot_be_ranks_of_cuda() {
    if dropless::backends::usable(BackendKind::Cuda) {
        return;
    }
    let arguments = ["launch", "--nproc", "2", "--", "train"];
    let directory = tempfile::tempdir().unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).current_dir(directory.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("error: cuda: no "), "{output:?}");
}

#[test]
fn the_number_of_ranks_is_one_that_a_machine_can_have() {
    for ranks in ["0", "257", "100000"] {
        let output = launch(ranks, "touch started");
        assert_eq!(output.status.code(), Some(2));
        let lines = lines(&output.stderr);
        assert!(lines.len() == 1 && lines[0].contains("not in 1..=256"), "{lines:?}");
    }
}

#[test]
fn the_code_of_the_first_rank_that_fails_is_that_of_the_launch() {
    // Rank 1 fails first; rank 0 then sees it and ends with a code of its own, in the time that it is given.
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("failed");
    let line = format!(
        "if [ $RANK = 1 ]; then touch {0}; exit 7; fi; while [ ! -e {0} ]; do sleep 0.05; done; sleep 0.5; \
         echo rank 1 is gone >&2; exit 9",
        mark.display()
    );
    let output = launch("2", &line);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(lines(&output.stderr), ["rank 1 failed: exit status: 7", "rank 1 is gone"]);
}

#[test]
fn ranks_that_run_on_are_ended_with_what_they_started() {
    let dir = tempfile::tempdir().unwrap();
    let started = Instant::now();
    // Neither rank 1's shell nor its child, whose heart beats in a file, ends when it is asked to.
    let beat = dir.path().join("beat");
    let line = format!(
        "case $RANK in 0) while [ ! -e {0} ]; do sleep 0.05; done; kill -9 $$;; *) trap '' TERM; \
         sh -c 'trap \"\" TERM; i=0; while :; do i=$((i + 1)); echo $i > {0}; sleep 0.05; done';; esac",
        beat.display()
    );
    let output = launch("2", &line);
    assert_eq!(output.status.code(), Some(128 + 9));
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    let last = std::fs::read(&beat).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(std::fs::read(&beat).unwrap(), last, "what rank 1 started still runs");
}

#[test]
fn signals_are_passed_on() {
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().display();
        // Rank 0 has something to do before it ends; no other rank reacts until it has.
        let line = format!(
            "end() {{ touch {path}/saved; exit $1; }}; trap 'end 130' INT; trap 'end 143' TERM; touch {path}/$RANK; \
             while :; do sleep 0.05; done"
        );
        let launch = command("2", &line).spawn().unwrap();
        ["0", "1"].iter().for_each(|rank| made(&dir.path().join(rank)));
        signal(&launch, name);
        assert_eq!(launch.wait_with_output().unwrap().status.code(), Some(code), "{name}");
        assert!(dir.path().join("saved").exists());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_do_not_outlive_a_launch_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display();
    let line = format!("trap 'touch {path}/ended-$RANK; exit' TERM; touch {path}/$RANK; while :; do sleep 0.05; done");
    let mut launch = command("2", &line).spawn().unwrap();
    ["0", "1"].iter().for_each(|rank| made(&dir.path().join(rank)));
    launch.kill().unwrap();
    launch.wait().unwrap();
    ["ended-0", "ended-1"].iter().for_each(|mark| made(&dir.path().join(mark)));
}

#[test]
fn what_cannot_be_started_is_one_line() {
    let arguments = ["launch", "--nproc", "2", "--program", "/no/such/program", "--", "train"];
    let output = Command::new(env!("CARGO_BIN_EXE_dropless")).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let lines = lines(&output.stderr);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("error: launch: /no/such/program: "), "{lines:?}");
}
