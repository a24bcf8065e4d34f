//! File descriptors between the processes of a machine, over sockets that have no file.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// How often a message that is not there yet is looked for.
const POLL: Duration = Duration::from_millis(2);
/// How long a connection may take to bring its descriptor.
const BRINGING: Duration = Duration::from_secs(5);

/// Where a process takes the descriptors that others give it.
#[derive(Debug)]
pub(super) struct Mailbox {
    name: String,
    listener: UnixListener,
}

impl Mailbox {
    pub(super) fn open() -> io::Result<Mailbox> {
        static OPENED: AtomicUsize = AtomicUsize::new(0);
        let name = format!("dropless-{}-{}", std::process::id(), OPENED.fetch_add(1, Ordering::Relaxed));
        let listener = UnixListener::bind_addr(&address(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Mailbox { name, listener })
    }

    /// What the others need to know of it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The member at `place` of a group gives its descriptor to the mailboxes of the others, and takes theirs, by place.
    /// There is none for itself.
    ///
    /// # Errors
    /// A failure of the system, or a descriptor that does not come within `timeout`.
    pub(super) fn exchange(
        self,
        own: BorrowedFd<'_>,
        names: &[String],
        place: usize,
        timeout: Duration,
    ) -> io::Result<Vec<Option<OwnedFd>>> {
        for (_, name) in names.iter().enumerate().filter(|(member, _)| *member != place) {
            give(name, place, own)?;
        }
        let deadline = Instant::now() + timeout;
        let mut all: Vec<_> = names.iter().map(|_| None).collect();
        let mut missing = names.len() - 1;
        while missing > 0 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // Anybody may connect.
                    let Ok((member, descriptor)) = take(&stream, deadline.min(Instant::now() + BRINGING)) else {
                        continue;
                    };
                    let entry = all.get_mut(member).filter(|entry| entry.is_none() && member != place);
                    *entry.ok_or_else(|| io::Error::other(format!("member {member} came twice")))? = Some(descriptor);
                    missing -= 1;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(POLL);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }
}

/// An address that exists as long as the socket.
fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

fn give(name: &str, place: usize, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let stream = UnixStream::connect_addr(&address(name)?)?;
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    message.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(&stream, &[IoSlice::new(&place.to_le_bytes())], &mut message, SendFlags::empty())?;
    Ok(())
}

/// The place of the member that a connection comes from, and its descriptor. Other users are not listened to.
fn take(stream: &UnixStream, deadline: Instant) -> io::Result<(usize, OwnedFd)> {
    if rustix::net::sockopt::socket_peercred(stream)?.uid != rustix::process::getuid() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user's process connects"));
    }
    stream.set_read_timeout(Some(deadline.saturating_duration_since(Instant::now()).max(POLL)))?;
    let mut place = [0; size_of::<usize>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut place)], &mut message, flags)?;
    let mut descriptors = message.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    match descriptors.next().and_then(|mut descriptors| descriptors.next()) {
        Some(descriptor) if received.bytes == place.len() => Ok((usize::from_le_bytes(place), descriptor)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a message without a descriptor")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn every_member_gets_the_file_of_every_other() {
        let dir = tempfile::tempdir().unwrap();
        let mailboxes: Vec<_> = (0..3).map(|_| Mailbox::open().unwrap()).collect();
        let names: Vec<_> = mailboxes.iter().map(|mailbox| mailbox.name().to_owned()).collect();
        std::thread::scope(|s| {
            for (place, mailbox) in mailboxes.into_iter().enumerate() {
                let path = dir.path().join(place.to_string());
                std::fs::write(&path, format!("the file of {place}")).unwrap();
                let names = &names;
                s.spawn(move || {
                    let own = File::open(path).unwrap();
                    let others = mailbox.exchange(own.as_fd(), names, place, Duration::from_secs(60)).unwrap();
                    for (member, descriptor) in others.into_iter().enumerate() {
                        let text = descriptor.map(|descriptor| {
                            let mut text = String::new();
                            File::from(descriptor).read_to_string(&mut text).unwrap();
                            text
                        });
                        // The position in a file is shared by those who have its descriptor; the first has it all.
                        assert_eq!(text.is_none(), member == place);
                        assert!(text.is_none_or(|text| text.is_empty() || text == format!("the file of {member}")));
                    }
                });
            }
        });
    }

    #[test]
    fn f20_a_connection_without_a_descriptor_ends_nothing() {
        let mailboxes = [(); 2].map(|()| Mailbox::open().unwrap());
        let names = mailboxes.each_ref().map(|mailbox| mailbox.name().to_owned());
        let mut stranger = UnixStream::connect_addr(&address(&names[0]).unwrap()).unwrap();
        std::io::Write::write_all(&mut stranger, &[0; 8]).unwrap();
        drop(stranger);
        let file = tempfile::tempfile().unwrap();
        std::thread::scope(|s| {
            for (place, mailbox) in mailboxes.into_iter().enumerate() {
                let (names, file) = (&names, &file);
                s.spawn(move || {
                    let taken = mailbox.exchange(file.as_fd(), names, place, Duration::from_secs(60)).unwrap();
                    assert_eq!(taken.iter().flatten().count(), 1);
                });
            }
        });
    }

    #[test]
    fn a_member_that_gives_nothing_is_not_waited_for() {
        let (own, other) = (Mailbox::open().unwrap(), Mailbox::open().unwrap());
        let names = [own.name().to_owned(), other.name().to_owned()];
        let file = tempfile::tempfile().unwrap();
        let error = own.exchange(file.as_fd(), &names, 0, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }
}
