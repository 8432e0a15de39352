/* LD_PRELOAD: file operations below one folder fail with a chosen errno, or are written to a log.

   DYING_FOLDER   the folder
   DYING_ERRNO    number of the errno; without it nothing fails
   DYING_TRIGGER  a file; while it does not exist nothing fails
   DYING_ONLY     "OPERATION GLOB" a line: only these operations on such paths, relative to the folder
   DYING_SIDE     "launcher" or "node": only processes without or with DDPLAUNCH_RUN_ID in their environment
   DYING_LOG      a file that gets a line "OPERATION PATH" for each operation */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

static const char *folder, *trigger, *only, *log_file;
static int number;

__attribute__((constructor)) static void begin(void) {
    const char *side = getenv("DYING_SIDE"), *text = getenv("DYING_ERRNO");
    int is_node = getenv("DDPLAUNCH_RUN_ID") != NULL;
    if (side && strcmp(side, is_node ? "node" : "launcher"))
        return;
    folder = getenv("DYING_FOLDER");
    trigger = getenv("DYING_TRIGGER");
    only = getenv("DYING_ONLY");
    log_file = getenv("DYING_LOG");
    number = text ? atoi(text) : 0;
}

/* The path of a descriptor; empty if there is none. */
static void of_fd(int fd, char *found) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, found, PATH_MAX - 1);
    found[length < 0 ? 0 : length] = 0;
}

static void absolute(int dirfd, const char *path, char *found) {
    int fd, skipped = 0;
    char start[PATH_MAX];
    if (sscanf(path, "/proc/self/fd/%d/%n", &fd, &skipped) == 1 && skipped) {
        of_fd(fd, start);
        path += skipped;
    } else if (path[0] == '/') {
        snprintf(found, PATH_MAX, "%s", path);
        return;
    } else if (dirfd != AT_FDCWD) {
        of_fd(dirfd, start);
    } else if (!getcwd(start, sizeof start)) {
        start[0] = 0;
    }
    snprintf(found, PATH_MAX, "%.2000s/%.2000s", start, path);
}

/* Whether the operation is one of DYING_ONLY. */
static int is_chosen(const char *operation) {
    char pattern[PATH_MAX];
    for (const char *next = only; *next;) {
        size_t length = strcspn(next, "\n");
        snprintf(pattern, sizeof pattern, "%.*s", (int)length, next);
        if (!fnmatch(pattern, operation, 0))
            return 1;
        next += length + (next[length] == '\n');
    }
    return 0;
}

/* Whether this operation fails; then errno is set. A NULL path: dirfd is the file itself. */
static int fails(const char *operation, int dirfd, const char *path) {
    char found[PATH_MAX], line[PATH_MAX + 64];
    int before = errno;
    if (!folder)
        return 0;
    if (path)
        absolute(dirfd, path, found);
    else
        of_fd(dirfd, found);
    errno = before;
    size_t length = strlen(folder);
    if (strncmp(found, folder, length) || (found[length] && found[length] != '/'))
        return 0;
    int size = snprintf(line, sizeof line, "%s %s\n", operation, found[length] ? found + length + 1 : ".");
    if (log_file) {
        int fd = syscall(SYS_openat, AT_FDCWD, log_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0) {
            syscall(SYS_write, fd, line, size);
            syscall(SYS_close, fd);
        }
    }
    line[size - 1] = 0;
    if (!number || (only && !is_chosen(line)) || (trigger && syscall(SYS_faccessat, AT_FDCWD, trigger, F_OK))) {
        errno = before;
        return 0;
    }
    errno = number;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                                          \
    int name(const char *path, int flags, ...) {                            \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        int mode = va_arg(rest, int);                                       \
        va_end(rest);                                                       \
        return fails("open", AT_FDCWD, path) ? -1 : NEXT(name)(path, flags, mode); \
    }
#define OPENAT(name)                                                        \
    int name(int dirfd, const char *path, int flags, ...) {                 \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        int mode = va_arg(rest, int);                                       \
        va_end(rest);                                                       \
        return fails("open", dirfd, path) ? -1 : NEXT(name)(dirfd, path, flags, mode); \
    }
#define ON(result, name, operation, dirfd, path, parameters, ...) \
    result name parameters { return fails(operation, dirfd, path) ? -1 : NEXT(name)(__VA_ARGS__); }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON(int, mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON(int, mkdirat, "mkdir", dirfd, path, (int dirfd, const char *path, mode_t mode), dirfd, path, mode)
ON(int, rename, "rename", AT_FDCWD, to, (const char *from, const char *to), from, to)
ON(int, renameat, "rename", b, to, (int a, const char *from, int b, const char *to), a, from, b, to)
ON(int, unlink, "unlink", AT_FDCWD, path, (const char *path), path)
ON(int, unlinkat, "unlink", dirfd, path, (int dirfd, const char *path, int flags), dirfd, path, flags)
ON(int, rmdir, "rmdir", AT_FDCWD, path, (const char *path), path)
ON(int, chmod, "chmod", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON(int, fchmodat, "chmod", dirfd, path, (int dirfd, const char *path, mode_t mode, int flags), dirfd, path, mode, flags)
ON(int, stat, "stat", AT_FDCWD, path, (const char *path, struct stat *to), path, to)
ON(int, stat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *to), path, to)
ON(int, lstat, "stat", AT_FDCWD, path, (const char *path, struct stat *to), path, to)
ON(int, lstat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *to), path, to)
ON(int, fstatat, "stat", dirfd, path, (int dirfd, const char *path, struct stat *to, int flags), dirfd, path, to, flags)
ON(int, fstatat64, "stat", dirfd, path, (int dirfd, const char *path, struct stat64 *to, int flags), dirfd, path, to, flags)
ON(int, fstat, "fstat", fd, NULL, (int fd, struct stat *to), fd, to)
ON(int, fstat64, "fstat", fd, NULL, (int fd, struct stat64 *to), fd, to)
ON(int, statvfs, "statvfs", AT_FDCWD, path, (const char *path, struct statvfs *to), path, to)
ON(int, statvfs64, "statvfs", AT_FDCWD, path, (const char *path, struct statvfs64 *to), path, to)
ON(int, fstatvfs, "statvfs", fd, NULL, (int fd, struct statvfs *to), fd, to)
ON(int, fstatvfs64, "statvfs", fd, NULL, (int fd, struct statvfs64 *to), fd, to)
ON(int, utimensat, "utime", dirfd, path, (int dirfd, const char *path, const struct timespec t[2], int flags), dirfd, path, t, flags)
ON(int, flock, "flock", fd, NULL, (int fd, int how), fd, how)
ON(ssize_t, write, "write", fd, NULL, (int fd, const void *data, size_t size), fd, data, size)
ON(ssize_t, read, "read", fd, NULL, (int fd, void *data, size_t size), fd, data, size)
ON(ssize_t, pread, "read", fd, NULL, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
ON(ssize_t, pread64, "read", fd, NULL, (int fd, void *data, size_t size, off64_t at), fd, data, size, at)

DIR *opendir(const char *path) { return fails("list", AT_FDCWD, path) ? NULL : NEXT(opendir)(path); }

/* A file system that dies reports it here, too; the descriptor is free afterwards. */
int close(int fd) {
    int is_failed = fails("close", fd, NULL), reason = errno, result = NEXT(close)(fd);
    if (is_failed) {
        errno = reason;
        return -1;
    }
    return result;
}
