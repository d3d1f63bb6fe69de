//! Opening of files that must be regular.
//!
//! To open a pipe blocks until the other side is opened, so a pipe in the place of a file would stop a program for
//! ever. These functions do not block, and refuse whatever is not a regular file, a folder, a pipe or a device, by what
//! was opened and not by what has its name. No other place of larder opens a file for reading.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    path::Path,
};

use super::system::{NO_LINK, is_of_no_file, open_without_blocking};

/// Opens the regular file at `path` for reading.
pub fn open_regular(path: &Path) -> io::Result<File> {
    open_regular_with(OpenOptions::new().read(true), path)
}

/// Opens the regular file at `path` for reading, unless a symbolic link is there.
pub fn open_regular_no_link(path: &Path) -> io::Result<File> {
    open_regular_with_flags(OpenOptions::new().read(true), NO_LINK, path).map_err(|e| {
        if path.is_symlink() {
            io::Error::new(io::ErrorKind::InvalidInput, "is a symbolic link, not a regular file")
        } else {
            e
        }
    })
}

/// Opens the regular file at `path` as `options` say. What is refused was neither truncated nor read, unless `options`
/// truncate it.
pub fn open_regular_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    open_regular_with_flags(options, 0, path)
}

/// The same with `flags` of the system's own call.
pub fn open_regular_with_flags(options: &mut OpenOptions, flags: u32, path: &Path) -> io::Result<File> {
    let file = open_without_blocking(options, flags, path)?;
    let what = match file.metadata() {
        Ok(found) if found.is_file() => return Ok(file),
        Ok(found) if found.is_dir() => "is a folder, not a regular file",
        Err(e) if !is_of_no_file(&e) => return Err(e),
        _ => "is not a regular file",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// The bytes of the regular file at `path`, which has at most `limit` bytes.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let long = |bytes: u64| {
        io::Error::new(io::ErrorKind::InvalidData, format!("is {bytes} bytes long; at most {limit} are read"))
    };
    let len = file.metadata()?.len();
    if len > limit {
        return Err(long(len));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    // A file may grow meanwhile.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// The text of the regular file at `path`, which has at most `limit` bytes.
pub fn read_regular_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read_regular(path, limit)?)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("is not UTF-8 text: {}", e.utf8_error())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[cfg(unix)]
    #[test]
    fn pipes_folders_and_devices_are_refused_at_once() {
        use rustix::fs::{CWD, Mode, mkfifoat};

        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mkfifoat(CWD, &pipe, Mode::RWXU).unwrap();
        let paths = [pipe, dir.path().to_owned(), "/dev/zero".into()];
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for path in paths {
                done.send((open_regular(&path).unwrap_err(), read_regular(&path, 10).unwrap_err())).unwrap();
                let opened = open_regular_with(OpenOptions::new().read(true).write(true), &path);
                assert!(opened.is_err());
            }
        });
        for _ in 0..3 {
            let (opening, reading) = wait.recv_timeout(std::time::Duration::from_secs(5)).unwrap();
            for error in [opening, reading] {
                assert!(error.kind() == io::ErrorKind::InvalidInput, "{error}");
            }
        }
        assert!(wait.recv_timeout(std::time::Duration::from_secs(5)).is_err());
    }

    #[cfg(windows)]
    #[test]
    fn devices_are_refused() {
        for error in [open_regular(Path::new("NUL")).unwrap_err(), read_regular(Path::new("NUL"), 10).unwrap_err()] {
            assert!(
                error.kind() == io::ErrorKind::InvalidInput && error.to_string() == "is not a regular file",
                "{error}"
            );
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_opened_only_where_links_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| dir.path().join(name));
        fs::write(&file, "abc").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(open_regular(&link).is_ok() && open_regular_no_link(&file).is_ok());
        assert!(open_regular_no_link(&link).unwrap_err().to_string().contains("symbolic link"));
        assert_eq!(open_regular_no_link(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn files_are_read_up_to_the_limit_and_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "abc").unwrap();
        assert_eq!(read_regular(&path, 3).unwrap(), b"abc");
        assert_eq!(read_regular(&path, 2).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(open_regular(dir.path()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        #[cfg(unix)]
        {
            use rustix::fs::{OFlags, fcntl_getfl};
            assert!(!fcntl_getfl(open_regular(&path).unwrap()).unwrap().contains(OFlags::NONBLOCK));
        }
        fs::write(&path, [0xff]).unwrap();
        assert!(read_regular_text(&path, 9).unwrap_err().to_string().contains("UTF-8"));
        assert_eq!(open_regular(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
