//! What the ranks tell each other. They may live in different processes, so all of it goes through the backend's exchange.

use dropless_core::{Backend, DType, Error as CoreError, Group, Timeouts};
use dropless_model::collective::gather;

use crate::error::{Error, Result};

/// Bytes that a rank brings at most: names and hashes of all its tensors.
const MOST: u32 = 1 << 28;

/// Everyone's number, by rank.
pub(crate) fn gather_number(backend: &dyn Backend, mine: u32) -> Result<Vec<u32>> {
    let mine = backend.upload(DType::U32, &[1], &[mine])?;
    Ok(backend.download(&gather(backend, Group::World, &mine)?)?)
}

/// What everyone brought, by rank.
pub(crate) fn gather_bytes(backend: &dyn Backend, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    let len = u32::try_from(mine.len()).map_err(|_| Error::Usage(format!("{} bytes for the ranks", mine.len())))?;
    let lengths = gather_number(backend, len)?;
    if let Some(rank) = lengths.iter().position(|&theirs| theirs > MOST) {
        return Err(said(backend, rank, &format!("brings {} bytes, expected at most {MOST}", lengths[rank])));
    }
    if lengths.get(backend.caps().rank) != Some(&len) {
        return Err(said(backend, backend.caps().rank, "has other bytes at the others than it brought"));
    }
    let longest = lengths.iter().max().map_or(0, |&n| n as usize);
    let mut words = vec![0u32; longest.div_ceil(size_of::<u32>())];
    bytemuck::cast_slice_mut(&mut words)[..mine.len()].copy_from_slice(mine);
    let padded = backend.upload(DType::U32, &[words.len()], &words)?;
    let all: Vec<u32> = backend.download(&gather(backend, Group::World, &padded)?)?;
    let of_rank = |(rank, &len): (usize, &u32)| {
        let words = &all[rank * words.len()..(rank + 1) * words.len()];
        bytemuck::cast_slice(words)[..len as usize].to_vec()
    };
    Ok(lengths.iter().enumerate().map(of_rank).collect())
}

/// What the first rank brought.
pub(crate) fn broadcast(backend: &dyn Backend, mine: &str) -> Result<String> {
    let first = gather_bytes(backend, mine.as_bytes())?.swap_remove(0);
    String::from_utf8(first).map_err(|error| said(backend, 0, &format!("brings what is no text: {error}")))
}

/// What a rank says that none says.
pub(crate) fn said(backend: &dyn Backend, rank: usize, what: &str) -> Error {
    CoreError::Collective { rank: backend.caps().rank, op: "gather", what: format!("rank {rank} {what}") }.into()
}

/// Does what these ranks of one process need, with the timeouts of those who wait for them suspended.
pub(crate) fn away<T>(ranks: &[&dyn Backend], work: impl FnOnce() -> Result<T>) -> Result<T> {
    let timeouts = ranks.iter().fold(Timeouts::default(), |all, rank| all.and(&rank.caps().timeouts));
    timeouts.suspend()?;
    let done = work();
    let back = timeouts.resume();
    let value = done?;
    back?;
    Ok(value)
}

/// What `mine` makes while this rank is [`away`], if it succeeds on every rank; else this rank's error, or that another
/// rank failed at `work`.
pub(crate) fn agree<T>(backend: &dyn Backend, work: &'static str, mine: impl FnOnce() -> Result<T>) -> Result<T> {
    let mine = away(&[backend], mine);
    let done = gather_number(backend, u32::from(mine.is_ok()));
    let value = mine?;
    match done?.iter().position(|&done| done == 0) {
        None => Ok(value),
        Some(failed) => {
            let what = format!("rank {failed} failed");
            Err(CoreError::Collective { rank: backend.caps().rank, op: work, what }.into())
        }
    }
}

/// Fails on every rank unless all of them have the same.
pub(crate) fn same(backend: &dyn Backend, what: &str, mine: &[u8]) -> Result<()> {
    let all = gather_bytes(backend, mine)?;
    match all.iter().position(|theirs| *theirs != all[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::Usage(format!("rank {rank} has another {what} than rank 0"))),
    }
}

#[cfg(test)]
mod tests {
    use dropless_core::host::{Host, HostOptions};
    use dropless_tests::metered::Metered;

    use super::*;

    fn on_ranks<R: Send>(ranks: usize, work: impl Fn(&dyn Backend) -> R + Sync) -> Vec<R> {
        let hosts = Host::ranks(ranks, HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = hosts.into_iter().map(|host| scope.spawn(move || work(&host))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn bytes_of_any_length_come_by_rank() {
        let words = ["", "seven b", "four"];
        for all in on_ranks(3, |backend| gather_bytes(backend, words[backend.caps().rank].as_bytes()).unwrap()) {
            assert_eq!(all, words.map(|word| word.as_bytes().to_vec()));
        }
        for all in on_ranks(2, |backend| gather_bytes(backend, &[]).unwrap()) {
            assert_eq!(all, [[], []] as [[u8; 0]; 2]);
        }
        let first = on_ranks(3, |backend| broadcast(backend, ["ab", "", "c"][backend.caps().rank]).unwrap());
        assert_eq!(first, ["ab"; 3]);
    }

    #[test]
    fn f20_what_no_rank_brings_is_an_error_with_its_name() {
        // Of rank 1, a length without the bytes; of rank 0, bytes that are no text.
        let errors = on_ranks(2, |backend| match backend.caps().rank {
            0 => gather_bytes(backend, b"all of it").unwrap_err().to_string(),
            _ => format!("{:?}", gather_number(backend, u32::MAX).unwrap()),
        });
        let brought = format!("rank 0: gather: rank 1 brings {} bytes, expected at most {MOST}", u32::MAX);
        assert_eq!(errors, [brought, format!("[9, {}]", u32::MAX)]);
        let errors = on_ranks(2, |backend| match backend.caps().rank {
            0 => gather_bytes(backend, b"\xff\xfe").map(|_| String::new()),
            _ => broadcast(backend, ""),
        });
        let error = errors[1].as_ref().unwrap_err().to_string();
        assert!(error.starts_with("rank 1: gather: rank 0 brings what is no text: "), "{error}");
    }

    #[test]
    fn a_failure_is_everyones() {
        let outcomes = on_ranks(3, |backend| {
            let rank = backend.caps().rank;
            let mine = if rank == 1 { Err(Error::Data("no text".into())) } else { Ok(rank) };
            agree(backend, "reading", || mine).map_err(|e| e.to_string())
        });
        let elsewhere = |rank| Err(format!("rank {rank}: reading: rank 1 failed"));
        assert_eq!(outcomes, [elsewhere(0), Err("data: no text".into()), elsewhere(2)]);
        assert_eq!(on_ranks(2, |backend| agree(backend, "reading", || Ok(7)).unwrap()), [7, 7]);
    }

    #[test]
    fn a_rank_is_busy_while_it_works_and_not_in_the_exchange() {
        let hosts = Host::ranks(2, HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        let ranks: Vec<Metered<Host>> = hosts.into_iter().map(Metered::new).collect();
        for fails in [false, true] {
            std::thread::scope(|scope| {
                for rank in &ranks {
                    scope.spawn(move || {
                        let done = agree(rank, "writing", || {
                            assert!(rank.is_busy());
                            if fails && rank.caps().rank == 1 { Err(Error::Data("no text".into())) } else { Ok(()) }
                        });
                        // The exchange itself holds that no rank is busy.
                        assert!(!rank.is_busy());
                        assert_eq!(done.is_err(), fails, "{done:?}");
                    });
                }
            });
        }
    }

    #[test]
    fn the_first_rank_that_differs_is_named_on_all_of_them() {
        let check = |seeds: [u8; 3]| {
            on_ranks(3, |backend| same(backend, "seed", &[seeds[backend.caps().rank]]).map_err(|e| e.to_string()))
        };
        assert_eq!(check([4, 4, 4]), [const { Ok(()) }; 3]);
        assert_eq!(check([4, 4, 5]), [const { "rank 2 has another seed than rank 0" }; 3].map(|e| Err(e.to_owned())));
    }
}
