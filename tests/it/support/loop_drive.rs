//! A drive of tests that can be unplugged: a loop device with a file system, where this process may make one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const BYTES: u64 = 64 << 20;

/// A mounted drive; unmounted and detached when dropped.
pub struct LoopDrive {
    dir: tempfile::TempDir,
    /// The device, while there is one.
    device: Option<String>,
    /// Number of images so far: the drive comes back as another file.
    images: u32,
}

impl LoopDrive {
    /// An empty drive. `None`, and it is said why, where none can be made.
    pub fn new() -> Option<Self> {
        Self::made().map_err(|why| println!("skipped: no loop device can be mounted here ({why})")).ok()
    }

    fn made() -> Result<Self, String> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).map_err(|e| e.to_string())?;
        let mut drive = LoopDrive { dir, device: None, images: 0 };
        fs::create_dir(drive.folder()).map_err(|e| e.to_string())?;
        let image = fs::File::create(drive.image()).map_err(|e| e.to_string())?;
        image.set_len(BYTES).map_err(|e| e.to_string())?;
        run("mkfs.ext4", &["-q", "-F", &text(&drive.image())])?;
        drive.attach()?;
        Ok(drive)
    }

    /// Where it is mounted.
    pub fn folder(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join(format!("image-{}", self.images))
    }

    fn attach(&mut self) -> Result<(), String> {
        let device = run("losetup", &["-f", "--show", &text(&self.image())])?.trim().to_owned();
        self.device = Some(device.clone());
        run("mount", &[&device, &text(&self.folder())]).map(drop)
    }

    /// Lets all reads from it fail, as those of a drive that was pulled out do; it stays mounted. What it holds is kept
    /// for [`plug`](Self::plug).
    pub fn fail(&mut self) {
        run("sync", &["-f", &text(&self.folder())]).unwrap();
        let failing = self.image();
        self.images += 1;
        fs::copy(&failing, self.image()).unwrap();
        fs::OpenOptions::new().write(true).open(failing).unwrap().set_len(0).unwrap();
    }

    /// Takes the mount point and the device away, as a desktop does when a drive was pulled out.
    pub fn vanish(&mut self) {
        run("umount", &["-l", &text(&self.folder())]).unwrap();
        self.device.take().iter().for_each(|device| drop(run("losetup", &["-d", device])));
    }

    /// Mounts it again, as another device.
    pub fn plug(&mut self) {
        self.attach().unwrap();
    }
}

impl Drop for LoopDrive {
    fn drop(&mut self) {
        let _ = run("umount", &["-l", &text(&self.folder())]);
        self.device.take().iter().for_each(|device| drop(run("losetup", &["-d", device])));
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("paths of tests are text").to_owned()
}

/// Runs a program of the system and returns what it prints.
fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(args).output().map_err(|e| format!("{program}: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}
