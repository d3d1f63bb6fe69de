//! The drive and the file system of a path, as the system names them.

use std::fs;
use std::path::Path;

use larder_core::printable;
use larder_os::FileId;

/// Drive and file system, such as `Samsung SSD 990 PRO 2TB, ext4`; `None` where the system does not say.
pub fn name(path: &Path) -> Option<String> {
    let number = device_number(FileId::of(path).ok()?.device)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let (kind, source) = mounted(&mounts, &number)?;
    let sys = Path::new("/sys/dev/block").join(&number);
    // A partition lies in the folder of its drive.
    let model = ["device/model", "../device/model"].iter().find_map(|file| fs::read_to_string(sys.join(file)).ok());
    let model = model.map(|model| model.trim().to_owned()).filter(|model| !model.is_empty());
    Some(described(model.as_deref(), kind, source))
}

/// A device number as Linux writes it.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn device_number(device: u64) -> Option<String> {
    Some(format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)))
}

/// Other systems have no list of drives by number.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn device_number(_: u64) -> Option<String> {
    None
}

fn described(model: Option<&str>, kind: &str, source: &str) -> String {
    match (model, source.strip_prefix("/dev/")) {
        (Some(model), _) => format!("{}, {}", printable(model), printable(kind)),
        (None, Some(device)) => format!("{}, {}", printable(device), printable(kind)),
        (None, None) => printable(kind),
    }
}

/// Type and source of the file system with a device number, from the text of `/proc/self/mountinfo`.
fn mounted<'a>(mounts: &'a str, number: &str) -> Option<(&'a str, &'a str)> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number))?;
    let mut after = line.split_once(" - ")?.1.split(' ');
    Some((after.next()?, after.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_is_found_by_its_device_number() {
        let mounts =
            "36 35 98:0 / /mnt rw,noatime master:1 - ext4 /dev/root rw\n37 35 0:42 / /x rw - overlay overlay rw\n";
        assert_eq!(mounted(mounts, "98:0"), Some(("ext4", "/dev/root")));
        assert_eq!(mounted(mounts, "0:42"), Some(("overlay", "overlay")));
        assert_eq!(mounted(mounts, "8:1"), None);
        assert_eq!(mounted("36 35 98:0 /", "98:0"), None);
    }

    #[test]
    fn a_drive_has_its_model_or_else_its_device() {
        assert_eq!(described(Some("SSD 1"), "ext4", "/dev/sda1"), "SSD 1, ext4");
        assert_eq!(described(None, "xfs", "/dev/vda"), "vda, xfs");
        assert_eq!(described(None, "overlay", "overlay"), "overlay");
    }
}
