//! Who this process is among those of its job: the variables of torchrun, Slurm and Open MPI.

mod secret;

use std::net::IpAddr;

use crate::error::{Error, Result};
pub use secret::{SECRET, SECRET_FILE, Secret};

/// The port of rank 0 where nothing names one.
const PORT: u16 = 29500;
/// The variable with the address at which rank 0 listens, where it is not one of `MASTER_ADDR`.
pub const LISTEN: &str = "DROPLESS_LISTEN";
/// More than any job has: what is above is a slip.
const MOST_RANKS: usize = 1 << 16;

/// This process among the processes of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// This process.
    pub rank: usize,
    /// Processes of the job.
    pub ranks: usize,
    /// This process among those of its machine.
    pub local_rank: usize,
    /// The machine of rank 0.
    pub host: String,
    /// Where rank 0 waits for the others.
    pub port: u16,
    /// The address at which rank 0 listens, where it is not one of `host`.
    pub listen: Option<IpAddr>,
    /// The launcher says that all ranks are on one machine.
    pub one_machine: bool,
    /// What tells the job from others, as far as its launcher says.
    pub job: String,
    /// What its processes know and nobody else.
    pub secret: Option<Secret>,
}

/// The variables of a launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    /// How many ranks are on this machine.
    local_ranks: &'static str,
    /// Any of these says that it started this process.
    signs: &'static [&'static str],
}

/// In the order in which they count: `torchrun` may itself run under one of the others. A shell or a batch script inside
/// an allocation of Slurm has `SLURM_PROCID` and the job's `SLURM_NTASKS`, too, without being one of several tasks; what
/// `srun` starts has the number of tasks of its step.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        ranks: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_ranks: "LOCAL_WORLD_SIZE",
        signs: &["RANK", "WORLD_SIZE"],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_ranks: "OMPI_COMM_WORLD_LOCAL_SIZE",
        signs: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        ranks: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        // Of one node, that is all of the step.
        local_ranks: "SLURM_STEP_TASKS_PER_NODE",
        signs: &["SLURM_STEP_NUM_TASKS"],
    },
];

impl World {
    /// What the environment says; None when no launcher started this process.
    ///
    /// # Errors
    /// [`Error::Argument`] when a variable is missing, does not say what it should, or contradicts another.
    pub fn from_environment() -> Result<Option<World>> {
        World::from_variables(&|name| std::env::var(name).ok())
    }

    /// That the processes of the job can tell each other from strangers, if there are several.
    ///
    /// # Errors
    /// [`Error::Argument`] without a secret.
    pub fn check_secret(&self) -> Result<()> {
        if self.ranks == 1 || self.secret.is_some() {
            return Ok(());
        }
        let expected = format!(
            "random bytes that only the {} processes of the job have, the same for all of them (or {SECRET_FILE}, the \
             path of a file with them; dropless launch makes one)",
            self.ranks
        );
        Err(refused(SECRET, NOT_SET.into(), expected))
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<World>> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let port = match variable("MASTER_PORT") {
            None => None,
            Some(text) => match text.parse::<u16>() {
                Ok(port) if port > 0 => Some(port),
                _ => return Err(refused("MASTER_PORT", text, "a port, 1 to 65535".into())),
            },
        };
        let Some(launcher) = LAUNCHERS.iter().find(|l| l.signs.iter().any(|sign| variable(sign).is_some())) else {
            return Ok(None);
        };
        let missing = |name| refused(name, NOT_SET.into(), format!("what {} sets for every rank", launcher.name));
        let number = |name: &'static str| match variable(name) {
            None => Ok(None),
            Some(text) => match text.parse::<usize>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(refused(name, format!("{text:?}"), "a number".into())),
            },
        };
        let rank = number(launcher.rank)?.ok_or_else(|| missing(launcher.rank))?;
        let ranks = number(launcher.ranks)?.ok_or_else(|| missing(launcher.ranks))?;
        if !(1..=MOST_RANKS).contains(&ranks) {
            return Err(refused(launcher.ranks, ranks.to_string(), format!("1 to {MOST_RANKS}")));
        }
        if rank >= ranks {
            let expected = format!("less than {}, which is {ranks}", launcher.ranks);
            return Err(refused(launcher.rank, rank.to_string(), expected));
        }
        // A container with one process for each rank has no reason to say which it is.
        let local_rank = number(launcher.local_rank)?.unwrap_or(0);
        if local_rank > rank {
            let expected = format!("at most {}, which is {rank}", launcher.rank);
            return Err(refused(launcher.local_rank, local_rank.to_string(), expected));
        }
        let one_machine = ranks == 1 || variable(launcher.local_ranks).is_some_and(|all| all == ranks.to_string());
        let host = match variable("MASTER_ADDR") {
            Some(host) => host,
            None if launcher.name == "torchrun" && ranks > 1 => return Err(missing("MASTER_ADDR")),
            None if one_machine => "127.0.0.1".into(),
            None if launcher.name == "Slurm" => variable("SLURM_STEP_NODELIST")
                .or_else(|| variable("SLURM_JOB_NODELIST"))
                .and_then(|list| first_node(&list))
                .ok_or_else(|| missing("SLURM_STEP_NODELIST (or MASTER_ADDR)"))?,
            None => {
                let expected = "the machine of rank 0, passed on to every rank (mpirun -x)";
                return Err(refused("MASTER_ADDR", NOT_SET.into(), expected.into()));
            }
        };
        let port = match port {
            Some(port) => port,
            None if ranks == 1 => PORT,
            None if launcher.name == "torchrun" => return Err(missing("MASTER_PORT")),
            // Two jobs may share a machine.
            None => PORT - 1 - u16::try_from(number("SLURM_JOB_ID")?.unwrap_or(0) % 10_000).unwrap_or(0),
        };
        // torchrun keeps a store of its own at that port.
        let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = if taken { port.checked_add(1).unwrap_or(PORT) } else { port };
        let listen = match variable(LISTEN) {
            None => None,
            Some(text) => match text.parse() {
                Ok(address) => Some(address),
                Err(_) => return Err(refused(LISTEN, format!("{text:?}"), "an IP address".into())),
            },
        };
        let names =
            ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"];
        let job = names.iter().filter_map(|name| variable(name)).collect::<Vec<_>>().join(".");
        let secret = if ranks > 1 { Secret::find(&variable)? } else { None };
        Ok(Some(World { rank, ranks, local_rank, host, port, listen, one_machine, job, secret }))
    }
}

/// What a variable that is not there says.
const NOT_SET: &str = "not set";

fn refused(name: &'static str, found: String, expected: String) -> Error {
    Error::Argument { op: "environment", field: name, expected, found }
}

/// The first machine of a list such as `rack[1-2]n[04,07-09],login`: up to the first comma outside of brackets, with the
/// first number of each bracket.
fn first_node(list: &str) -> Option<String> {
    let mut node = String::new();
    let (mut inside, mut skip) = (false, false);
    for c in list.chars() {
        match c {
            '[' => (inside, skip) = (true, false),
            ']' => (inside, skip) = (false, false),
            ',' if !inside => break,
            ',' | '-' if inside => skip = true,
            _ if !skip => node.push(c),
            _ => {}
        }
    }
    Some(node).filter(|node| !node.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<Option<World>> {
        World::from_variables(&|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    fn refusal(variables: &[(&str, &str)]) -> String {
        world(variables).unwrap_err().to_string()
    }

    const TORCHRUN: [(&str, &str); 5] =
        [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node-7"), ("MASTER_PORT", "4321")];

    fn with(changes: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        let kept = TORCHRUN.iter().filter(|(name, _)| changes.iter().all(|(changed, _)| changed != name));
        kept.chain(changes).copied().collect()
    }

    #[test]
    fn without_a_launcher_there_is_one_process() {
        assert_eq!(world(&[]).unwrap(), None);
        assert_eq!(world(&[("SLURM_NTASKS", "8"), ("MASTER_ADDR", "here")]).unwrap(), None, "a shell in an allocation");
    }

    #[test]
    fn f10_what_runs_inside_an_allocation_of_slurm_without_srun_is_alone() {
        let shell = [("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")];
        assert_eq!(world(&shell).unwrap(), None);
        // The interactive step of `salloc`, and `srun --ntasks 1`.
        let step = [&shell[..], &[("SLURM_STEP_NUM_TASKS", "1")]].concat();
        let alone = world(&step).unwrap().unwrap();
        assert_eq!((alone.rank, alone.ranks), (0, 1));
    }

    #[test]
    fn torchrun() {
        let expected = World {
            rank: 5,
            ranks: 8,
            local_rank: 1,
            host: "node-7".into(),
            port: 4321,
            listen: None,
            one_machine: false,
            job: "run.2".into(),
            secret: None,
        };
        let run = [("TORCHELASTIC_RUN_ID", "run"), ("TORCHELASTIC_RESTART_COUNT", "2")];
        assert_eq!(world(&with(&run)).unwrap(), Some(expected.clone()));
        let store = [&run[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(world(&with(&store)).unwrap(), Some(World { port: 4322, ..expected.clone() }));
        let under_slurm = [&run[..], &[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")]].concat();
        assert_eq!(world(&with(&under_slurm)).unwrap(), Some(expected.clone()));
        let elsewhere = [&run[..], &[("LOCAL_WORLD_SIZE", "8"), ("DROPLESS_LISTEN", "10.0.0.7")]].concat();
        let found = world(&with(&elsewhere)).unwrap();
        assert_eq!(found, Some(World { listen: "10.0.0.7".parse().ok(), one_machine: true, ..expected }));
        assert_eq!(world(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().unwrap().ranks, 1);
    }

    #[test]
    fn one_process_in_each_container() {
        let variables = TORCHRUN.iter().filter(|(name, _)| *name != "LOCAL_RANK").copied().collect::<Vec<_>>();
        assert_eq!(world(&variables).unwrap().unwrap().local_rank, 0);
    }

    #[test]
    fn slurm() {
        let variables = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "1234567"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_STEP_NODELIST", "gpu[03-04]"),
        ];
        let found = world(&variables).unwrap().unwrap();
        let expected = World {
            rank: 3,
            ranks: 4,
            local_rank: 1,
            host: "gpu03".into(),
            port: 24932,
            listen: None,
            one_machine: false,
            job: "1234567.2".into(),
            secret: None,
        };
        assert_eq!(found, expected);
        let named = [&variables[..], &[("MASTER_ADDR", "head"), ("MASTER_PORT", "99")]].concat();
        assert_eq!(world(&named).unwrap(), Some(World { host: "head".into(), port: 99, ..expected.clone() }));
        let together = [&variables[..], &[("SLURM_STEP_TASKS_PER_NODE", "4")]].concat();
        let found = world(&together).unwrap();
        assert_eq!(found, Some(World { host: "127.0.0.1".into(), one_machine: true, ..expected.clone() }));
        let apart = [&variables[..], &[("SLURM_STEP_TASKS_PER_NODE", "2(x2)")]].concat();
        assert_eq!(world(&apart).unwrap(), Some(expected));
        assert!(refusal(&variables[..5]).contains("SLURM_STEP_NODELIST"));
    }

    #[test]
    fn the_first_of_a_list_of_nodes() {
        let cases = [
            ("a", "a"),
            ("a,b", "a"),
            ("gpu-h200-[07,09]", "gpu-h200-07"),
            ("gpu[003-010],login1", "gpu003"),
            ("rack[1-2]n[04,07-09]x,other", "rack1n04x"),
        ];
        for (list, node) in cases {
            assert_eq!(first_node(list).as_deref(), Some(node), "{list}");
        }
        assert_eq!(first_node(""), None);
    }

    #[test]
    fn open_mpi() {
        let variables = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let found = world(&variables).unwrap().unwrap();
        assert_eq!((found.rank, found.ranks, found.local_rank, &*found.host), (1, 2, 1, "127.0.0.1"));
        let two_machines = [&variables[..3], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]].concat();
        assert!(refusal(&two_machines).contains("MASTER_ADDR is not set"));
    }

    #[test]
    fn f10_what_is_missing_or_contradictory_is_named() {
        for absent in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let variables = with(&[(absent, "")]);
            let expected = format!("environment: {absent} is not set, expected what torchrun sets for every rank");
            assert_eq!(refusal(&variables), expected);
        }
        let cases: [(&[(&str, &str)], &str); 8] = [
            (&[("RANK", "8")], "RANK is 8, expected less than WORLD_SIZE, which is 8"),
            (&[("RANK", "-1")], "RANK is \"-1\", expected a number"),
            (&[("WORLD_SIZE", "0")], "WORLD_SIZE is 0, expected 1 to 65536"),
            (&[("WORLD_SIZE", "100000")], "WORLD_SIZE is 100000, expected 1 to 65536"),
            (&[("LOCAL_RANK", "6")], "LOCAL_RANK is 6, expected at most RANK, which is 5"),
            (&[("MASTER_PORT", "99999")], "MASTER_PORT is 99999, expected a port, 1 to 65535"),
            (&[("MASTER_PORT", "0")], "MASTER_PORT is 0, expected a port, 1 to 65535"),
            (&[("DROPLESS_LISTEN", "eth0")], "DROPLESS_LISTEN is \"eth0\", expected an IP address"),
        ];
        for (changes, expected) in cases {
            assert_eq!(refusal(&with(changes)), format!("environment: {expected}"));
        }
        // It would be ignored, but nobody means it.
        assert!(refusal(&[("MASTER_PORT", "99999")]).contains("MASTER_PORT is 99999"));
    }

    #[test]
    fn f20_several_processes_need_a_secret_and_one_needs_none() {
        let without = world(&TORCHRUN).unwrap().unwrap();
        let line = without.check_secret().unwrap_err().to_string();
        assert!(
            line.starts_with("environment: DROPLESS_SECRET is not set, expected random bytes that only the 8"),
            "{line}"
        );
        assert!(line.contains("DROPLESS_SECRET_FILE"), "{line}");
        let with_one = world(&with(&[("DROPLESS_SECRET", "0123456789abcdef")])).unwrap().unwrap();
        with_one.check_secret().unwrap();
        // Whose would have nobody to show it to.
        let alone = with(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("DROPLESS_SECRET", "short")]);
        world(&alone).unwrap().unwrap().check_secret().unwrap();
    }
}
