//! Who this process is among those of its job: the variables of torchrun, Slurm and Open MPI.

use dropless_core::{Error, Result};

use crate::BACKEND;
use crate::device::devices;

/// The port of rank 0 where nothing names one.
const PORT: u16 = 29500;

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
    /// What tells the job from others, as far as its launcher says.
    pub job: String,
}

/// The variables of a launcher.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    /// Any of these says that it started this process.
    signs: &'static [&'static str],
}

/// In the order in which they count: `torchrun` may itself run under one of the others. A shell inside an allocation of
/// Slurm has `SLURM_NTASKS` too, without being a task.
const LAUNCHERS: [Launcher; 3] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        ranks: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        signs: &["RANK", "WORLD_SIZE"],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        signs: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        ranks: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        signs: &["SLURM_PROCID"],
    },
];

impl World {
    /// What the environment says; None when no launcher started this process.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when a variable is missing, is not a number, or contradicts another.
    pub fn from_environment() -> Result<Option<World>> {
        World::from_variables(&|name| std::env::var(name).ok())
    }

    /// Index of this process's device: its place on the machine, unless it was shown a single device.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver or a device.
    pub fn device(&self) -> Result<usize> {
        Ok(if devices()?.len() == 1 { 0 } else { self.local_rank })
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<World>> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let Some(launcher) = LAUNCHERS.iter().find(|l| l.signs.iter().any(|sign| variable(sign).is_some())) else {
            return Ok(None);
        };
        let missing = |name: &str| refused(format!("{name} is not set, but {} sets it for every rank", launcher.name));
        let number = |name: &str| match variable(name) {
            None => Ok(None),
            Some(text) => match text.parse::<usize>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(refused(format!("{name} is {text:?}, expected a number"))),
            },
        };
        let rank = number(launcher.rank)?.ok_or_else(|| missing(launcher.rank))?;
        let ranks = number(launcher.ranks)?.ok_or_else(|| missing(launcher.ranks))?;
        if rank >= ranks {
            return Err(refused(format!("{} is {rank}, but {} is {ranks}", launcher.rank, launcher.ranks)));
        }
        // A container with one process for each rank has no reason to say which it is.
        let local_rank = number(launcher.local_rank)?.unwrap_or(0);
        if local_rank > rank {
            return Err(refused(format!("{} is {local_rank}, but {} is {rank}", launcher.local_rank, launcher.rank)));
        }
        let host = match variable("MASTER_ADDR") {
            Some(host) => host,
            None if ranks == 1 => "127.0.0.1".into(),
            None => match launcher.name {
                "Slurm" => variable("SLURM_STEP_NODELIST")
                    .or_else(|| variable("SLURM_JOB_NODELIST"))
                    .and_then(|list| first_node(&list))
                    .ok_or_else(|| missing("MASTER_ADDR (or SLURM_STEP_NODELIST)"))?,
                "Open MPI" if number("OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(ranks) => "127.0.0.1".into(),
                "Open MPI" => {
                    return Err(refused("MASTER_ADDR is not set: pass on the machine of rank 0 (mpirun -x)".into()));
                }
                _ => return Err(missing("MASTER_ADDR")),
            },
        };
        let port = match number("MASTER_PORT")? {
            Some(port) => u16::try_from(port).ok().filter(|&port| port > 0),
            None if ranks == 1 => Some(PORT),
            None if launcher.name == "torchrun" => return Err(missing("MASTER_PORT")),
            // Two jobs may share a machine.
            None => Some(PORT - 1 - u16::try_from(number("SLURM_JOB_ID")?.unwrap_or(0) % 10_000).unwrap_or(0)),
        };
        let port = port.ok_or_else(|| refused("MASTER_PORT is not a port (1 to 65535)".into()))?;
        // torchrun keeps a store of its own at that port.
        let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = if taken { port.checked_add(1).unwrap_or(PORT) } else { port };
        let names =
            ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"];
        let job = names.iter().filter_map(|name| variable(name)).collect::<Vec<_>>().join(".");
        Ok(Some(World { rank, ranks, local_rank, host, port, job }))
    }
}

fn refused(why: String) -> Error {
    Error::Unavailable { backend: BACKEND, why }
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
    fn torchrun() {
        let expected =
            World { rank: 5, ranks: 8, local_rank: 1, host: "node-7".into(), port: 4321, job: "run.2".into() };
        let run = [("TORCHELASTIC_RUN_ID", "run"), ("TORCHELASTIC_RESTART_COUNT", "2")];
        assert_eq!(world(&with(&run)).unwrap(), Some(expected.clone()));
        let store = [&run[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(world(&with(&store)).unwrap(), Some(World { port: 4322, ..expected.clone() }));
        let under_slurm = [&run[..], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]].concat();
        assert_eq!(world(&with(&under_slurm)).unwrap(), Some(expected));
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
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "1234567"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_STEP_NODELIST", "gpu[03-04]"),
        ];
        let found = world(&variables).unwrap().unwrap();
        let expected =
            World { rank: 3, ranks: 4, local_rank: 1, host: "gpu03".into(), port: 24932, job: "1234567.2".into() };
        assert_eq!(found, expected);
        let named = [&variables[..], &[("MASTER_ADDR", "head"), ("MASTER_PORT", "99")]].concat();
        assert_eq!(world(&named).unwrap(), Some(World { host: "head".into(), port: 99, ..expected }));
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
    fn what_is_missing_or_contradictory_is_named() {
        for absent in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            let variables = with(&[(absent, "")]);
            assert_eq!(refusal(&variables), format!("cuda: {absent} is not set, but torchrun sets it for every rank"));
        }
        let cases: [(&[(&str, &str)], &str); 5] = [
            (&[("RANK", "8")], "RANK is 8, but WORLD_SIZE is 8"),
            (&[("RANK", "-1")], "RANK is \"-1\", expected a number"),
            (&[("WORLD_SIZE", "0")], "RANK is 5, but WORLD_SIZE is 0"),
            (&[("LOCAL_RANK", "6")], "LOCAL_RANK is 6, but RANK is 5"),
            (&[("MASTER_PORT", "70000")], "MASTER_PORT is not a port (1 to 65535)"),
        ];
        for (changes, expected) in cases {
            assert_eq!(refusal(&with(changes)), format!("cuda: {expected}"));
        }
    }
}
