//! The power supply: mains or battery, where the system reports it; and fewer compute threads on battery.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use larder_kernels::ThreadPool;

use crate::notice::{Notice, Notices};
use crate::options::BatteryOptions;

#[cfg(windows)]
mod windows;

/// Folder in which Linux lists power supplies.
pub const POWER_SUPPLIES: &str = "/sys/class/power_supply";

/// Time between looks at the power supply. A look can take some ten milliseconds where the battery has a slow controller, so a
/// thread of its own does it.
const INTERVAL: Duration = Duration::from_secs(3);

/// What the system reports about the power supply.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PowerSupplies {
    /// State of the machine's battery, as in `Discharging`; `None` if it has none.
    pub battery: Option<String>,
    /// Whether a power adapter is connected; `None` if none is listed.
    pub mains: Option<bool>,
}

impl PowerSupplies {
    /// The supplies that are listed in `folder`; on Windows those that the system reports, unless another folder is named. Batteries of mice and other devices are not the machine's.
    pub fn read(folder: &Path) -> Self {
        #[cfg(windows)]
        if folder == Path::new(POWER_SUPPLIES) {
            return windows::supplies();
        }
        let entries = fs::read_dir(folder).into_iter().flatten();
        let mut all: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        all.sort();
        let mut found = PowerSupplies::default();
        for supply in all.iter().filter(|supply| word(supply, "scope").as_deref() != Some("Device")) {
            match word(supply, "type").as_deref() {
                Some("Battery") => {
                    let status = word(supply, "status");
                    let discharging = status.as_deref() == Some("Discharging");
                    if found.battery.is_none() || discharging {
                        found.battery = status;
                    }
                }
                Some("UPS") | None => {}
                // Mains, and the kinds of USB.
                Some(_) => {
                    let online = word(supply, "online").is_some_and(|online| online != "0");
                    found.mains = Some(online || found.mains.unwrap_or(false));
                }
            }
        }
        found
    }

    /// Whether the machine runs on its battery. Where that is not known, it does not.
    pub fn is_on_battery(&self) -> bool {
        match (&self.battery, self.mains) {
            (None, _) | (_, Some(true)) => false,
            (Some(_), Some(false)) => true,
            (Some(status), None) => status == "Discharging",
        }
    }
}

fn word(supply: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(supply.join(name)).ok()?.trim().to_owned())
}

/// A thread that lets a pool use fewer threads while the machine runs on its battery. Dropping it ends the thread.
pub(crate) struct PowerWatch {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PowerWatch {
    /// Looks at the power supply now, and then every few seconds.
    pub fn start(options: &BatteryOptions, pool: &Arc<ThreadPool>, notices: &Notices) -> io::Result<Self> {
        let mut power =
            PowerThreads { options: options.clone(), pool: pool.clone(), notices: notices.clone(), on_battery: false };
        power.look();
        let (end, ended) = channel();
        let watch = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                power.look();
            }
        };
        let thread = thread::Builder::new().name("larder-power".into()).spawn(watch)?;
        Ok(PowerWatch { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for PowerWatch {
    fn drop(&mut self) {
        drop(self.end.take());
        // A thread that panicked has changed nothing.
        self.thread.take().map(JoinHandle::join);
    }
}

/// The threads of a pool by the power supply.
struct PowerThreads {
    options: BatteryOptions,
    pool: Arc<ThreadPool>,
    notices: Notices,
    on_battery: bool,
}

impl PowerThreads {
    fn look(&mut self) {
        let on_battery = PowerSupplies::read(&self.options.supplies).is_on_battery();
        if on_battery == std::mem::replace(&mut self.on_battery, on_battery) {
            return;
        }
        let all = self.pool.threads();
        let threads = if on_battery { self.options.threads.min(all) } else { all };
        self.pool.use_threads(threads);
        self.notices.send(Notice::Power { on_battery, threads, all });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Writes a file of a supply.
    fn set(root: &Path, supply: &str, file: &str, text: &str) {
        let folder = root.join(supply);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(file), format!("{text}\n")).unwrap();
    }

    fn supplies(files: &[(&str, &str, &str)]) -> PowerSupplies {
        let root = tempfile::tempdir().unwrap();
        files.iter().for_each(|(supply, file, text)| set(root.path(), supply, file, text));
        PowerSupplies::read(root.path())
    }

    #[test]
    fn the_adapter_decides_and_without_one_the_battery() {
        let battery = |status| [("BAT0", "type", "Battery"), ("BAT0", "status", status)];
        let adapter = |online| [("AC", "type", "Mains"), ("AC", "online", online)];
        let usb = |online| [("ucsi-1", "type", "USB"), ("ucsi-1", "online", online)];
        let is_on = |parts: &[[(&str, &str, &str); 2]]| supplies(&parts.concat()).is_on_battery();
        assert!(!is_on(&[]) && !is_on(&[adapter("0")]), "no battery");
        assert!(is_on(&[battery("Discharging")]) && !is_on(&[battery("Charging")]) && !is_on(&[battery("Full")]));
        assert!(is_on(&[battery("Unknown"), adapter("0")]) && !is_on(&[battery("Discharging"), adapter("1")]));
        assert!(!is_on(&[battery("Charging"), adapter("0"), usb("1")]));
        assert!(is_on(&[battery("Discharging"), adapter("0"), usb("0")]));
        let mouse = [("hid-1", "type", "Battery"), ("hid-1", "status", "Discharging"), ("hid-1", "scope", "Device")];
        assert_eq!(supplies(&mouse), PowerSupplies::default());
        let two = [battery("Full"), [("BAT1", "type", "Battery"), ("BAT1", "status", "Discharging")]].concat();
        assert_eq!(supplies(&two).battery.as_deref(), Some("Discharging"));
        assert!(!PowerSupplies::read(Path::new("/nowhere")).is_on_battery());
    }

    #[test]
    fn a_change_of_the_supply_is_said_once_and_changes_the_threads() {
        let root = tempfile::tempdir().unwrap();
        set(root.path(), "AC", "type", "Mains");
        set(root.path(), "AC", "online", "1");
        set(root.path(), "BAT0", "type", "Battery");
        let said = Arc::new(Mutex::new(Vec::new()));
        let theirs = said.clone();
        let notices = Notices::to(move |notice| theirs.lock().unwrap().push(notice.to_string()));
        let pool = Arc::new(ThreadPool::new(4, false).unwrap());
        let options = BatteryOptions { threads: 2, supplies: root.path().to_owned() };
        let mut power = PowerThreads { options, pool: pool.clone(), notices, on_battery: false };
        let mut look = |online: &str| {
            set(root.path(), "AC", "online", online);
            set(root.path(), "BAT0", "status", "Unknown");
            power.look();
            pool.threads_in_use()
        };
        assert_eq!(["1", "0", "0", "1", "1"].map(&mut look), [4, 2, 2, 4, 4]);
        let expected = ["power: on battery, 2 of 4 compute threads", "power: plugged in, 4 of 4 compute threads"];
        assert_eq!(*said.lock().unwrap(), expected);
    }
}
