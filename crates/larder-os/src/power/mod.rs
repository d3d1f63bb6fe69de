//! The power supply: mains or battery, where the system reports it.

use std::fs;
use std::path::{Path, PathBuf};

#[cfg(windows)]
mod windows;

/// Folder in which Linux lists power supplies.
pub const POWER_SUPPLIES: &str = "/sys/class/power_supply";

/// What the system reports about the power supply.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PowerSupplies {
    /// State of the machine's battery, as in `Discharging`; `None` if it has none.
    pub battery: Option<String>,
    /// Whether a power adapter is connected; `None` if none is listed.
    pub mains: Option<bool>,
}

impl PowerSupplies {
    /// The supplies that are listed in `folder`; on Windows those that the system reports, unless another folder is
    /// named. Batteries of mice and other devices are not the machine's.
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

#[cfg(test)]
mod tests {
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
}
