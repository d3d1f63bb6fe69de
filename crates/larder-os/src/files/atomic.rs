//! Output files: written whole or not at all, and only where a regular file may be.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use super::system::{create_private, is_of_no_file, replace_file};

/// Symbolic links that are followed from one to the next.
const LINKS_MAX: usize = 40;

/// Writes a file under a temporary name, makes its content durable, and renames it. A symbolic link is followed, and
/// the file that it leads to is replaced, with its permissions kept. After an error the file is as it was, and nothing
/// is left beside it. What is neither absent nor a regular file (a device, a named pipe, a folder) is refused.
pub fn write_atomically(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let (path, existing) = output_file(path)?;
    replace(
        &path,
        |path| File::create_new(path),
        |out| {
            write(out)?;
            existing.map_or(Ok(()), |existing| out.get_ref().set_permissions(existing.permissions()))
        },
    )
}

/// Writes a file that only this user can read, in the same way, but a symbolic link is replaced and not followed.
pub fn write_privately(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    if !path.is_symlink() {
        output_file(path)?;
    }
    replace(path, create_private, write)
}

/// Replaces what is at `path` by a new file that `create` makes.
fn replace(
    path: &Path,
    create: impl FnOnce(&Path) -> io::Result<File>,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let temp = temp_path(path);
    let written = remove_leftover(&temp).and_then(|()| create(&temp)).and_then(|file| {
        let mut out = BufWriter::new(file);
        write(&mut out)?;
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        replace_file(&temp, path)
    });
    written.inspect_err(|_| {
        // A temporary file that remains is removed by the next attempt.
        let _ = fs::remove_file(&temp);
    })
}

/// The file that writing to `path` replaces, links followed, and its metadata if it exists. An error if anything but a
/// regular file is there.
pub fn output_file(path: &Path) -> io::Result<(PathBuf, Option<fs::Metadata>)> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let found = match fs::symlink_metadata(&path) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((path, None)),
            Err(e) if is_of_no_file(&e) => return Err(not_a_file("a device, a pipe or a socket")),
            Err(e) => return Err(e),
        };
        if found.is_file() {
            return Ok((path, Some(found)));
        }
        if !found.is_symlink() {
            let what = if found.is_dir() { "a folder" } else { "a device, a pipe or a socket" };
            return Err(not_a_file(what));
        }
        // A relative target begins at the folder of the link.
        let target = fs::read_link(&path)?;
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "is a symbolic link that leads to itself; name a file"))
}

fn not_a_file(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("is {what} and not a file; name a file"))
}

/// A new file, instead of what an interrupted attempt left. A symbolic link is replaced and not followed.
pub fn create_new(path: &Path) -> io::Result<File> {
    remove_leftover(path).and_then(|()| File::create_new(path))
}

fn remove_leftover(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// The temporary name of a file that is being written.
pub fn temp_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(dir: &Path) -> Vec<PathBuf> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_atomically(&path, |out| out.write_all(b"first")).unwrap();
        let failed = write_atomically(&path, |out| {
            out.write_all(&[0; 1 << 20])?;
            assert!(temp_path(&path).exists());
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"first");
        write_atomically(&path, |out| out.write_all(b"second")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        let refused = write_atomically(&folder, |out| out.write_all(b"third")).unwrap_err();
        assert!(refused.to_string().contains("is a folder"), "{refused}");
        assert_eq!(names(dir.path()), [path, folder], "no temporary file is left");
    }

    #[test]
    fn threads_that_replace_a_file_at_the_same_time_leave_one_that_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let contents = [[b'a'; 5000], [b'b'; 5000]];
        std::thread::scope(|scope| {
            for content in &contents {
                let temp = dir.path().join(char::from(content[0]).to_string());
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        fs::write(&temp, content).unwrap();
                        replace_file(&temp, path).unwrap();
                    }
                });
            }
        });
        assert!(contents.iter().any(|content| fs::read(&path).unwrap() == content));
        assert_eq!(names(dir.path()), [path]);
    }

    #[cfg(windows)]
    #[test]
    fn devices_are_refused() {
        let refused = write_atomically(Path::new("NUL"), |out| out.write_all(b"x")).unwrap_err();
        assert!(refused.to_string().starts_with("is a device"), "{refused}");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_devices_refused() {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
        use std::os::unix::net::UnixListener;

        let dir = tempfile::tempdir().unwrap();
        let [file, link, dangling, socket, circle] =
            ["file", "link", "dangling", "socket", "circle"].map(|name| dir.path().join(name));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("file", &link).unwrap();
        write_atomically(&link, |out| out.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        symlink("absent", &dangling).unwrap();
        write_atomically(&dangling, |out| out.write_all(b"there")).unwrap();
        assert_eq!(fs::read(dir.path().join("absent")).unwrap(), b"there");

        let _listener = UnixListener::bind(&socket).unwrap();
        symlink("circle", &circle).unwrap();
        for path in [&socket, &circle, Path::new("/dev/null")] {
            let refused = write_atomically(path, |out| out.write_all(b"x")).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{}: {refused}", path.display());
        }
        assert!(fs::symlink_metadata("/dev/null").unwrap().file_type().is_char_device());
        assert!(fs::symlink_metadata(&socket).unwrap().file_type().is_socket());

        // A private file takes the place of a link, and of the permissions that were there.
        write_privately(&link, |out| out.write_all(b"private")).unwrap();
        assert_eq!((fs::read(&file).unwrap(), fs::read(&link).unwrap()), (b"new".to_vec(), b"private".to_vec()));
        fs::set_permissions(&link, fs::Permissions::from_mode(0o644)).unwrap();
        write_privately(&link, |out| out.write_all(b"again")).unwrap();
        let found = fs::symlink_metadata(&link).unwrap();
        assert_eq!((found.is_file(), found.permissions().mode() & 0o777), (true, 0o600));

        // A link with the temporary name is replaced and not written through.
        let victim = dir.path().join("victim");
        fs::write(&victim, "whole").unwrap();
        symlink(&victim, temp_path(&file)).unwrap();
        write_atomically(&file, |out| out.write_all(b"newer")).unwrap();
        assert_eq!((fs::read(&victim).unwrap(), fs::read(&file).unwrap()), (b"whole".to_vec(), b"newer".to_vec()));
        assert!(!names(dir.path()).contains(&temp_path(&file)));
    }
}
