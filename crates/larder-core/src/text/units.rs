//! Sizes in bytes, and counts, as text.

/// Parses a size in bytes: `4G`, `1.5 GiB`, `512 MB`. Units are decimal, except those with an `i`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1000,
        "m" | "mb" => 1000_u64.pow(2),
        "g" | "gb" => 1000_u64.pow(3),
        "t" | "tb" => 1000_u64.pow(4),
        "ki" | "kib" => 1 << 10,
        "mi" | "mib" => 1 << 20,
        "gi" | "gib" => 1 << 30,
        "ti" | "tib" => 1 << 40,
        _ if number.is_empty() => return Err("is not a size such as 4G or 512MiB".into()),
        _ => return Err(format!("'{unit}' is not a unit of memory; use G, M, GiB or MiB")),
    };
    match number.parse::<f64>() {
        Ok(n) if n >= 0.0 => Ok((n * factor as f64) as u64),
        _ => Err("is not a size such as 4G or 512MiB".into()),
    }
}

const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];

/// Bytes with a decimal unit and about three digits.
pub fn format_bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match (unit, value) {
        (0, _) => format!("{n} B"),
        (_, v) if v < 9.995 => format!("{v:.2} {}", UNITS[unit]),
        (_, v) if v < 99.95 => format!("{v:.1} {}", UNITS[unit]),
        (_, v) => format!("{v:.0} {}", UNITS[unit]),
    }
}

/// A count with a comma between each three digits.
pub fn format_count(n: usize) -> String {
    let digits = n.to_string();
    let comma = |at: usize| at > 0 && (digits.len() - at).is_multiple_of(3);
    digits.char_indices().flat_map(|(at, digit)| comma(at).then_some(',').into_iter().chain([digit])).collect()
}

/// The smallest size of three digits that is at least `n` bytes.
pub fn size_up(n: u64) -> String {
    rounded_size(n, u64::div_ceil)
}

/// The largest size of three digits that is at most `n` bytes.
pub fn size_down(n: u64) -> String {
    rounded_size(n, |n, step| n / step)
}

fn rounded_size(n: u64, divide: fn(u64, u64) -> u64) -> String {
    let fits = |(_, unit): &(usize, u64)| divide(n, *unit) < 1000;
    let units = (0..UNITS.len()).map(|at| (at, 1000u64.pow(at as u32)));
    let (at, unit) = units.clone().find(fits).unwrap_or((UNITS.len() - 1, 1000u64.pow(4)));
    // Below 10 and 100, two and one decimals.
    let decimals = match divide(n, unit) {
        _ if at == 0 => 0,
        whole if whole < 10 && divide(n, unit / 100) < 1000 => 2,
        whole if whole < 100 && divide(n, unit / 10) < 1000 => 1,
        _ => 0,
    };
    let step = unit / 10u64.pow(decimals);
    let count = divide(n, step.max(1));
    format!("{:.*} {}", decimals as usize, count as f64 / 10f64.powi(decimals as i32), UNITS[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_decimal_except_those_with_an_i() {
        assert_eq!(parse_bytes("4G"), Ok(4_000_000_000));
        assert_eq!(parse_bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes(" 512 m "), Ok(512_000_000));
        assert_eq!(parse_bytes("77"), Ok(77));
        for wrong in ["4X", "G", "-1G", "", "4 G B", "1.2.3M"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn units_never_round_to_a_thousand() {
        let shown: Vec<_> = [0, 999, 999_499, 999_500, 1_234_567_890].into_iter().map(format_bytes).collect();
        assert_eq!(shown, ["0 B", "999 B", "999 kB", "1.00 MB", "1.23 GB"]);
    }

    #[test]
    fn counts_have_commas() {
        let shown: Vec<_> = [0, 999, 1000, 19_871, 1_234_567].into_iter().map(format_count).collect();
        assert_eq!(shown, ["0", "999", "1,000", "19,871", "1,234,567"]);
    }

    #[test]
    fn suggested_sizes_are_large_or_small_enough() {
        let (up, down) = (size_up(655_360), size_down(655_360));
        assert_eq!((up.as_str(), down.as_str()), ("656 kB", "655 kB"));
        assert_eq!((size_up(4_194_305), size_down(4_194_305)), ("4.20 MB".into(), "4.19 MB".into()));
        assert_eq!((size_up(999_999), size_down(999_999)), ("1.00 MB".into(), "999 kB".into()));
        for n in [0, 1, 999, 1000, 1024, 9_999_999, 99_960_000, 123_456_789_012] {
            let of = |text: String| parse_bytes(&text).unwrap();
            assert!(of(size_up(n)) >= n && of(size_down(n)) <= n, "{n}: {} {}", size_up(n), size_down(n));
        }
    }
}
