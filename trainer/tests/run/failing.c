/*
 * Loaded before the system's library: the calls of a process that write, sync, rename, link or create below a directory
 * are counted, and one of them fails.
 *
 *     FAIL_BELOW   the directory, without links in it
 *     FAIL_AT      number of the call that fails, from 1
 *     FAIL_ERRNO   its error; of ENOSPC, every later call fails, too: a disk that is full stays so
 *     FAIL_ONLY    the one name of a call that is counted, if set
 *     FAIL_MARK    a file that is made when a call fails
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;

/* Whether this call, of a path below the directory, fails; errno is set then. */
static int fails(const char *call, const char *path) {
    const char *below = getenv("FAIL_BELOW"), *at = getenv("FAIL_AT"), *number = getenv("FAIL_ERRNO");
    const char *only = getenv("FAIL_ONLY"), *mark = getenv("FAIL_MARK");
    if (!below || !at || !number || strncmp(path, below, strlen(below)) != 0 || (only && strcmp(only, call) != 0))
        return 0;
    long own = atomic_fetch_add(&calls, 1) + 1, first = atol(at);
    int error = atoi(number);
    if (own != first && !(error == ENOSPC && own > first))
        return 0;
    if (mark)
        syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, mark, O_CREAT | O_WRONLY, 0600));
    errno = error;
    return 1;
}

static int fails_file(const char *call, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list more;                                          \
        va_start(more, flags);                                 \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; \
        va_end(more);                                          \
        if (flags & O_CREAT && fails("create", path))          \
            return -1;                                         \
        return NEXT(name)(path, flags, mode);                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                           \
    int name(int at, const char *path, int flags, ...) {       \
        va_list more;                                          \
        va_start(more, flags);                                 \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; \
        va_end(more);                                          \
        if (flags & O_CREAT && fails("create", path))          \
            return -1;                                         \
        return NEXT(name)(at, path, flags, mode);              \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    return fails("create", path) ? -1 : NEXT(mkdir)(path, mode);
}

ssize_t write(int file, const void *bytes, size_t count) {
    return fails_file("write", file) ? -1 : NEXT(write)(file, bytes, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    return fails_file("write", file) ? -1 : NEXT(writev)(file, parts, count);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t at) {
    return fails_file("write", file) ? -1 : NEXT(pwrite64)(file, bytes, count, at);
}

int ftruncate64(int file, off64_t length) {
    return fails_file("write", file) ? -1 : NEXT(ftruncate64)(file, length);
}

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t count, unsigned flags) {
    return fails_file("write", to) ? -1 : NEXT(copy_file_range)(from, from_at, to, to_at, count, flags);
}

int fsync(int file) {
    return fails_file("sync", file) ? -1 : NEXT(fsync)(file);
}

int fdatasync(int file) {
    return fails_file("sync", file) ? -1 : NEXT(fdatasync)(file);
}

int rename(const char *from, const char *to) {
    return fails("rename", to) ? -1 : NEXT(rename)(from, to);
}

int link(const char *from, const char *to) {
    return fails("link", to) ? -1 : NEXT(link)(from, to);
}

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    return fails("link", to) ? -1 : NEXT(linkat)(from_at, from, to_at, to, flags);
}

int symlink(const char *from, const char *to) {
    return fails("link", to) ? -1 : NEXT(symlink)(from, to);
}
