//! The memory limits of control groups, of version 1 and 2: the least of a group's own and of those that it lies in.

use std::path::{Path, PathBuf};

/// From here on a limit is none: version 1 writes the largest number of pages.
const NONE: u64 = 1 << 62;

/// The limit of the group that `/proc/self/cgroup` names, in the file systems of `/proc/self/mountinfo`; `read` reads a
/// file of theirs.
pub(super) fn limit(groups: &str, mounts: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (kind, file) = match controllers {
            "" => ("cgroup2", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => ("cgroup", "memory.limit_in_bytes"),
            _ => return None,
        };
        let (root, mount) = mounts.lines().find_map(|line| mounted(line, kind))?;
        // A group outside of what is mounted here shows at the mount itself.
        let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or("");
        let group = mount.join(below.trim_start_matches('/'));
        let within = group.ancestors().take_while(|dir| dir.starts_with(&mount));
        within.filter_map(|dir| read(&dir.join(file))?.trim().parse::<u64>().ok().filter(|&n| n < NONE)).min()
    });
    limits.min()
}

/// Root and place of a mounted hierarchy of this kind that limits memory.
fn mounted<'a>(line: &'a str, kind: &str) -> Option<(&'a str, PathBuf)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let found =
        system.next()? == kind && (kind == "cgroup2" || system.nth(1)?.split(',').any(|option| option == "memory"));
    let mut mount = mount.split(' ').skip(3);
    found.then_some((mount.next()?, PathBuf::from(mount.next()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
24 1 0:22 / /proc rw - proc proc rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
31 23 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";

    fn found(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        limit(groups, MOUNTS, |path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path);
            file.map(|(_, text)| format!("{text}\n"))
        })
    }

    #[test]
    fn f16_the_least_limit_of_all_groups_holds() {
        let files = [
            ("/sys/fs/cgroup/memory.max", "7"),
            ("/sys/fs/cgroup/a/memory.max", "5000"),
            ("/sys/fs/cgroup/a/b/memory.max", "max"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "6000"),
            ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712"),
        ];
        assert_eq!(found("0::/a/b", &files[1..]), Some(5000));
        assert_eq!(found("0::/a/b", &files), Some(7));
        assert_eq!(found("3:cpu,cpuacct:/x\n4:memory:/docker/abc/job", &files), Some(6000));
        assert_eq!(found("4:memory:/docker/abc/job\n0::/a", &files[1..]), Some(5000));
        // Seen from a namespace that begins elsewhere.
        assert_eq!(found("4:memory:/other", &files), Some(6000));
        assert_eq!(found("3:cpu,cpuacct:/x", &files), None);
        assert_eq!(found("", &files), None);
    }
}
