//! Findings about temperature, clock and power supply, where the system reports them.

use std::path::{Path, PathBuf};

use larder_os::power::PowerSupplies;
use serde_json::json;

use super::Finding;
use super::sysfs::{folders, read_word};

/// Above this temperature, in thousandths of a degree, many CPUs throttle soon.
const HOT_MILLIDEGREES: i64 = 85_000;

pub fn check() -> Vec<Finding> {
    check_in(Path::new("/sys"))
}

fn check_in(sys: &Path) -> Vec<Finding> {
    [temperature(sys), governor(sys), supply(sys)].into_iter().flatten().collect()
}

fn temperature(sys: &Path) -> Option<Finding> {
    let zones = folders(&sys.join("class/thermal"));
    let reading = |dir: &PathBuf| Some((read_word(dir, "temp")?.parse::<i64>().ok()?, read_word(dir, "type")?));
    let (hottest, zone) = zones.iter().filter_map(reading).max()?;
    let degrees = hottest as f64 / 1000.0;
    let numbers = json!({"celsius": degrees, "zone": zone});
    Some(Finding::new("temperature", format!("{degrees:.0} °C in the hottest zone ({zone})"), numbers).advise_if(
        hottest >= HOT_MILLIDEGREES,
        "the CPU is so hot that it may throttle",
        "let it cool down; clean the fan, improve the airflow, or use fewer threads (--threads)",
    ))
}

fn governor(sys: &Path) -> Option<Finding> {
    let dir = sys.join("devices/system/cpu/cpu0/cpufreq");
    let (governor, driver) =
        (read_word(&dir, "scaling_governor")?, read_word(&dir, "scaling_driver").unwrap_or_default());
    // With these drivers, powersave is the default and goes to the full clock under load.
    let adapts = driver.starts_with("intel_pstate") || driver.starts_with("amd-pstate");
    let numbers = json!({"governor": governor, "driver": driver});
    Some(Finding::new("clock", format!("governor {governor} ({driver})"), numbers).advise_if(
        governor == "powersave" && !adapts,
        "the CPU stays at its lowest clock",
        "sudo cpupower frequency-set -g performance",
    ))
}

fn supply(sys: &Path) -> Option<Finding> {
    let supplies = PowerSupplies::read(&sys.join("class/power_supply"));
    let battery = supplies.battery.as_ref()?;
    let found = format!("battery {}", battery.to_lowercase());
    let numbers = json!({"battery": battery, "mains": supplies.mains});
    Some(Finding::new("power", found, numbers).advise_if(
        supplies.is_on_battery(),
        "on battery, most machines limit their speed",
        "connect the power supply; `powerprofilesctl set performance` may help too",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::sysfs::tests::tree;

    #[test]
    fn heat_governor_and_battery_give_advice() {
        let root = tree(&[
            ("class/thermal/thermal_zone0/temp", "40000\n"),
            ("class/thermal/thermal_zone0/type", "acpitz\n"),
            ("class/thermal/thermal_zone1/temp", "91000\n"),
            ("class/thermal/thermal_zone1/type", "x86_pkg_temp\n"),
            ("class/power_supply/BAT0/type", "Battery\n"),
            ("class/power_supply/BAT0/status", "Discharging\n"),
            ("devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
            ("devices/system/cpu/cpu0/cpufreq/scaling_driver", "acpi-cpufreq\n"),
        ]);
        let all = check_in(root.path());
        assert_eq!(all.iter().filter(|f| f.advice.is_some()).count(), 3);
        assert!(all[0].found.contains("91 °C") && all[0].found.contains("x86_pkg_temp"));
    }

    #[test]
    fn defaults_are_good_and_absent_sensors_are_left_out() {
        let root = tree(&[
            ("devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
            ("devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate\n"),
        ]);
        let all = check_in(root.path());
        assert_eq!((all.len(), all[0].advice.is_some()), (1, false));
        assert!(check_in(&root.path().join("absent")).is_empty());
    }
}
